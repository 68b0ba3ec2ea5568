package kvgrpc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func TestWhatIsPrintedRedactedHasNoSecretAtAnyDepth(t *testing.T) {
	const secret = "open sesame"
	for _, message := range []proto.Message{
		&pb.Grant{Token: []byte(secret), EngineId: "P"},
		&pb.FinishedBlocksRequest{TransferKey: []byte(secret), RequestId: "P"},
		&pb.FinishedBlocksResponse{Grant: &pb.Grant{Token: []byte(secret), EngineId: "P"}},
		&pb.RenewLeasesRequest{Leases: []*pb.LeaseRef{LeaseByGrant(&pb.Grant{Token: []byte(secret), EngineId: "P"})}},
		&pb.CancelTransferRequest{
			Target:  &pb.CancelTransferRequest_TransferKey{TransferKey: []byte(secret)},
			Message: "P",
		},
		&pb.HandshakeRequest{Proofs: [][]byte{[]byte(secret)}, ExpectedEngineId: "P"},
	} {
		before := proto.Clone(message)
		text := Redacted(message)
		if strings.Contains(text, secret) || !strings.Contains(text, "[REDACTED]") || !strings.Contains(text, "P") {
			t.Errorf("%T: %s", message, text)
		}
		if !proto.Equal(before, message) {
			t.Errorf("%T is another one now", message)
		}
	}
	if Redacted(nil) != "<nil>" || Redacted((*pb.Grant)(nil)) != "<nil>" {
		t.Error("a message that is not there")
	}
}

func TestNeitherOptionsNorSidesPrintSecrets(t *testing.T) {
	options := Options{Timeout: time.Second, Metadata: map[string]string{"authorization": "Bearer open-sesame"}}
	side := Side{TransferKey: []byte("open sesame"), FreeAllocationIDs: []string{"a"}}
	texts := []string{fmt.Sprint(options), fmt.Sprintf("%+v", options), fmt.Sprintf("%+v", []Side{side})}
	for _, text := range texts {
		if strings.Contains(text, "sesame") || strings.Contains(text, "111 112 101") {
			t.Error(text)
		}
	}
	if want := "{Timeout:1s Metadata:[authorization]}"; texts[0] != want {
		t.Errorf("%s, want %s", texts[0], want)
	}
}
