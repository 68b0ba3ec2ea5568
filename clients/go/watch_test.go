package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

type watchStream = grpc.ServerStreamingServer[pb.WatchTransfersResponse]

func change(seq, incarnation uint64) *pb.WatchTransfersResponse {
	return &pb.WatchTransfersResponse{
		Header: header(seq, incarnation), Transfer: &pb.Transfer{TransferId: "t", EventSeq: seq},
	}
}

// watched runs a watch to its end. It returns what the watch yielded and what the server was asked for.
func watched(t *testing.T, point Point, watch func(attempt int, stream watchStream) error) (seen, asked []string, last error) {
	t.Helper()
	server := serve(t, "", &transfers{watch: func(r *pb.WatchTransfersRequest, stream watchStream) error {
		if r.Filter.GetRequestId() != "r" {
			t.Errorf("filter %v", r.Filter)
		}
		asked = append(asked, fmt.Sprintf("%d of %d", r.AfterEventSeq, r.Incarnation))
		return watch(len(asked), stream)
	}})
	client := connect(t, server, Options{})
	for message, err := range client.Watch(limited(t), &pb.TransferFilter{RequestId: "r"}, point) {
		if err != nil {
			last = err
			continue
		}
		note := fmt.Sprint(message.Header.EventSeq)
		if message.HistoryLost {
			note += " lost"
		}
		seen = append(seen, note)
	}
	return seen, asked, last
}

func equal(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

var lifeIsOver = refusal(codes.Aborted, "INCARNATION_CHANGED", "RECOMPUTE")

func TestABrokenWatchResumesAfterTheLastMessageWhateverItWas(t *testing.T) {
	seen, asked, err := watched(t, Point{}, func(attempt int, stream watchStream) error {
		switch attempt {
		case 1: // the present, a change, then the connection breaks
			stream.Send(&pb.WatchTransfersResponse{Header: header(4, 7)})
			stream.Send(change(5, 7))
			return status.Error(codes.Unavailable, "cut")
		case 2: // only the progress of the watch, then the server ends the stream
			stream.Send(&pb.WatchTransfersResponse{Header: header(9, 7)})
			return nil
		case 3:
			return refusal(codes.ResourceExhausted, "LIMIT_EXCEEDED", "RETRY_HERE")
		default:
			stream.Send(change(10, 7))
			return lifeIsOver
		}
	})
	equal(t, "seen", seen, "4", "5", "9", "10")
	equal(t, "asked", asked, "0 of 0", "5 of 7", "9 of 7", "9 of 7")
	if status.Code(err) != codes.Aborted {
		t.Error(err)
	}
}

func TestAWatchSurvivesConnectionsThatAreCut(t *testing.T) {
	var server *server
	attempts := 0
	server = serve(t, "", &transfers{watch: func(r *pb.WatchTransfersRequest, stream watchStream) error {
		attempts++
		stream.Send(change(r.AfterEventSeq+1, 7))
		<-stream.Context().Done()
		return nil
	}})
	client := connect(t, server, Options{})
	want := uint64(3)
	for message, err := range client.Watch(limited(t), nil, Point{2, 7}) {
		if err != nil {
			t.Fatal(err)
		}
		if message.Header.EventSeq != want {
			t.Fatalf("change %d, want %d", message.Header.EventSeq, want)
		}
		if want++; want == 6 {
			break
		}
		server.cut()
	}
	if attempts != 3 {
		t.Errorf("%d streams", attempts)
	}
}

func TestLostHistoryIsHandedOnAndTheWatchGoesOn(t *testing.T) {
	seen, asked, _ := watched(t, Point{1, 7}, func(attempt int, stream watchStream) error {
		stream.Send(&pb.WatchTransfersResponse{Header: header(90, 7), HistoryLost: true})
		stream.Send(change(91, 7))
		return lifeIsOver
	})
	equal(t, "seen", seen, "90 lost", "91")
	equal(t, "asked", asked, "1 of 7")
}

func TestAWatchEndsWithTheLifeThatItWatches(t *testing.T) {
	_, _, err := watched(t, Point{1, 7}, func(int, watchStream) error { return lifeIsOver })
	var failed *Error
	if !errors.As(err, &failed) || failed.FailureReason() != pb.FailureReason_FAILURE_REASON_INCARNATION_CHANGED {
		t.Error(err)
	}
}

func TestAMessageOfAnotherLifeEndsAWatch(t *testing.T) {
	seen, asked, err := watched(t, Point{}, func(attempt int, stream watchStream) error {
		stream.Send(change(uint64(attempt), 6+uint64(attempt)))
		return nil
	})
	equal(t, "seen", seen, "1")
	equal(t, "asked", asked, "0 of 0", "1 of 7")
	var failed *Error
	if !errors.As(err, &failed) || failed.Reason != "INCARNATION_CHANGED" || failed.Incarnation != 8 {
		t.Error(err)
	}
}

func TestAWatchThatIsRefusedEnds(t *testing.T) {
	_, asked, err := watched(t, Point{}, func(int, watchStream) error {
		return refusal(codes.InvalidArgument, "INVALID_FIELD", "FIX_REQUEST")
	})
	equal(t, "asked", asked, "0 of 0")
	if status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
}

func TestAWatchEndsWithItsContext(t *testing.T) {
	server := serve(t, "")
	server.grpc.Stop()
	ctx, cancel := context.WithCancel(limited(t))
	cancel()
	for message, err := range connect(t, server, Options{}).Watch(ctx, nil, Point{}) {
		if message != nil || !errors.Is(err, context.Canceled) {
			t.Errorf("%v, %v", message, err)
		}
	}
}

func TestAWatchWhoseMessageIsTooLongEnds(t *testing.T) {
	_, asked, err := watched(t, Point{}, func(_ int, stream watchStream) error {
		long := change(1, 7)
		long.Transfer.RequestId = strings.Repeat("x", 5<<20) // longer than a client accepts
		return stream.Send(long)
	})
	if status.Code(err) != codes.ResourceExhausted || len(asked) != 1 {
		t.Errorf("%d streams, %v", len(asked), err)
	}
}
