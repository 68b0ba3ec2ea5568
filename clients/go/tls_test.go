package kvgrpc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestUnusableFilesAreRefusedBeforeACall(t *testing.T) {
	folder := t.TempDir()
	empty := filepath.Join(folder, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for says, options := range map[string]Options{
		"no CA":               {TLS: &TLSFiles{Cert: "a", Key: "b"}},
		"no key":              {TLS: &TLSFiles{Cert: "a", CA: empty}},
		"a missing file":      {TLS: &TLSFiles{Dir: folder}},
		"no PEM":              {TLS: &TLSFiles{CA: empty}},
		"two tokens":          {Token: "a", TokenFile: empty},
		"an empty token":      {TokenFile: empty},
		"a token of two rows": {Token: "a\nb"},
	} {
		if client, err := Connect("127.0.0.1:1", options); err == nil {
			_ = client.Close()
			t.Errorf("%s: no error", says)
		}
	}
}

func TestATokenIsReadAgainAndAnUnusableFileLeavesTheLast(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("first\n")
	token, err := newBearer("", file)
	if err != nil {
		t.Fatal(err)
	}
	var sent []string
	for _, text := range []string{"first", "second\n", ""} {
		write(text)
		token.looked = time.Now().Add(-tokenLook)
		sent = append(sent, token.value())
	}
	if got := strings.Join(sent, ", "); got != "Bearer first, Bearer second, Bearer second" {
		t.Error(got)
	}
}

func TestNoTextShowsAToken(t *testing.T) {
	options := Options{Token: "secret"}
	if text := fmt.Sprintf("%v %+v %#v", options, options, options); strings.Contains(text, "secret") {
		t.Error(text)
	}
}
