package kvgrpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
)

// TLSFiles are the paths of PEM files for TLS. A path of its own stands in place of the folder's file. With CA alone the
// client checks the server and shows no certificate.
type TLSFiles struct {
	// Dir is a folder with tls.crt, tls.key and ca.crt, as Kubernetes and cert-manager name them.
	Dir string
	// Cert is the path of the client's certificate chain.
	Cert string
	// Key is the path of the client's key.
	Key string
	// CA is the path of the CAs that sign servers.
	CA string
}

// Credentials returns the credentials of a channel. The files are read again at each handshake, so that a new connection
// is made with the files of its moment. Files that became unusable leave the last ones, because who writes them may be
// half way.
func (f TLSFiles) Credentials() (credentials.TransportCredentials, error) {
	config, err := f.config()
	if err != nil {
		return nil, err
	}
	return &reloading{TransportCredentials: credentials.NewTLS(config), files: f, last: &last{config: config}}, nil
}

// config returns what the files hold now.
func (f TLSFiles) config() (*tls.Config, error) {
	cert, key, ca := f.path(f.Cert, "tls.crt"), f.path(f.Key, "tls.key"), f.path(f.CA, "ca.crt")
	switch {
	case ca == "":
		return nil, errors.New("kvgrpc: the CAs that sign servers have no path")
	case (cert == "") != (key == ""):
		return nil, errors.New("kvgrpc: a certificate and its key need a path each")
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool()}
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, fmt.Errorf("kvgrpc: %w", err)
	}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("kvgrpc: %s holds no certificate in PEM", ca)
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("kvgrpc: %s with %s: %w", cert, key, err)
		}
		// A certificate that the server's CAs did not sign is shown all the same, so that the server says no.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return config, nil
}

// reloading are the credentials of a channel whose files may change.
type reloading struct {
	credentials.TransportCredentials // those of the beginning, for all but handshakes

	files TLSFiles
	last  *last
}

// last holds what the files held when they were last usable. Copies of the credentials share it.
type last struct {
	mu     sync.Mutex
	config *tls.Config
}

// ClientHandshake makes the handshake of a new connection, with the files as they are now.
func (r *reloading) ClientHandshake(
	ctx context.Context, authority string, raw net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	r.last.mu.Lock()
	if config, err := r.files.config(); err == nil {
		r.last.config = config
	}
	config := r.last.config
	r.last.mu.Unlock()
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, raw)
}

// Clone returns a copy, as gRPC asks for.
func (r *reloading) Clone() credentials.TransportCredentials {
	return &reloading{r.TransportCredentials.Clone(), r.files, r.last}
}

func (f TLSFiles) path(own, name string) string {
	if own == "" && f.Dir != "" {
		return filepath.Join(f.Dir, name)
	}
	return own
}

// tokenLook is the time between two looks at the file of a token.
const tokenLook = time.Second

// bearer is the token of a client, from a file or as it was given.
type bearer struct {
	file string

	mu     sync.Mutex
	header string // the value of the metadata; a secret
	looked time.Time
}

// newBearer returns nil for no token.
func newBearer(token, file string) (*bearer, error) {
	switch {
	case token == "" && file == "":
		return nil, nil
	case token != "" && file != "":
		return nil, errors.New("kvgrpc: a token and a file of one are both given")
	case token != "":
		header, err := headerOf(token)
		return &bearer{header: header}, err
	}
	header, err := headerIn(file)
	return &bearer{file: file, header: header, looked: time.Now()}, err
}

// value returns the metadata of a call that is made now. A file that became unusable leaves the last token, because who
// writes the file may be half way.
func (b *bearer) value() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.file != "" && time.Since(b.looked) >= tokenLook {
		b.looked = time.Now()
		if header, err := headerIn(b.file); err == nil {
			b.header = header
		}
	}
	return b.header
}

func headerIn(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("kvgrpc: %w", err)
	}
	return headerOf(strings.TrimSpace(string(text)))
}

func headerOf(token string) (string, error) {
	if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", errors.New("kvgrpc: a token is one word of printable ASCII")
	}
	return "Bearer " + token, nil
}
