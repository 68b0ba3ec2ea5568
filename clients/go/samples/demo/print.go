package main

import (
	"context"
	"fmt"
	"strings"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// report prints what an operator wants to know of a transfer that is over.
func report(transfer *pb.Transfer) {
	fmt.Printf("transfer  %s %v: %d blocks, %d bytes, %d tokens in %v\n", transfer.TransferId, transfer.State,
		transfer.BlockCount, transfer.MovedBytes, transfer.UseTokens, transfer.Age.AsDuration())
	for _, path := range transfer.Paths {
		fmt.Printf("  path    %s, rank %d from rank %d: %d bytes in %d descriptors\n",
			path.DataPath, path.Rank, path.PeerRank, path.MovedBytes, path.DescriptorCount)
	}
	for _, phase := range transfer.Phases {
		name := strings.TrimPrefix(phase.Phase.String(), "TRANSFER_PHASE_")
		fmt.Printf("  phase   %-10s %v\n", name, phase.Duration.AsDuration())
	}
}

// whoPinsWhat prints the first page of pins and leases of each engine.
func whoPinsWhat(ctx context.Context, engines ...*kvgrpc.Client) error {
	for _, engine := range engines {
		pins, err := engine.Admin.ListPins(ctx, &pb.ListPinsRequest{})
		if err != nil {
			return err
		}
		leases, err := engine.Leases.ListLeases(ctx, &pb.ListLeasesRequest{})
		if err != nil {
			return err
		}
		fmt.Printf("pins      %s: %d pins, %d leases\n", pins.Header.EngineId, len(pins.Pins), len(leases.Leases))
		for _, pin := range pins.Pins {
			fmt.Printf("  pin     %v of %d blocks by %s for %q\n",
				pin.Kind, kvgrpc.BlockCount(pin.Blocks), pin.Owner, pin.RequestId)
		}
		for _, lease := range leases.Leases {
			fmt.Printf("  lease   %s, %v left, %d of %d consumers done\n",
				lease.LeaseId, lease.Remaining.AsDuration(), lease.DoneConsumerCount, lease.ConsumerCount)
		}
	}
	return nil
}
