package kvgrpc

import (
	"strings"
	"testing"

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
