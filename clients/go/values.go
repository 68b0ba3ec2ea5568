package kvgrpc

import (
	"crypto/rand"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// NewTransferKey returns 16 random bytes that pair the two sides of a transfer. They are a secret.
func NewTransferKey() []byte {
	key := make([]byte, 16)
	rand.Read(key) // never fails: the runtime ends the program first
	return key
}

// TokenContent returns the content of KV that was computed from these tokens, without adapter and salt, with the
// weights that the engine stated.
func TokenContent(tokenIDs []uint32) *pb.Content {
	return &pb.Content{Form: &pb.Content_Tokens{Tokens: &pb.TokenContent{TokenIds: tokenIDs}}}
}

// LeaseByID returns a reference to a lease by its id.
func LeaseByID(id string) *pb.LeaseRef {
	return &pb.LeaseRef{By: &pb.LeaseRef_LeaseId{LeaseId: id}}
}

// LeaseByGrant returns a reference to the lease that a grant stands on.
func LeaseByGrant(grant *pb.Grant) *pb.LeaseRef {
	return &pb.LeaseRef{By: &pb.LeaseRef_Grant{Grant: grant}}
}

// BlockRuns returns block ids as maximal runs, in their order, for engines with their own block manager.
func BlockRuns(ids []uint32) *pb.BlockRuns {
	runs := &pb.BlockRuns{}
	for i, id := range ids {
		if i > 0 && id == ids[i-1]+1 {
			runs.Counts[len(runs.Counts)-1]++
			continue
		}
		runs.Starts = append(runs.Starts, id)
		runs.Counts = append(runs.Counts, 1)
	}
	return runs
}

// BlockIDs returns the ids of runs, in their order.
func BlockIDs(runs *pb.BlockRuns) []uint32 {
	var ids []uint32
	for i, start := range runs.GetStarts() {
		for id := range runs.GetCounts()[i] {
			ids = append(ids, start+id)
		}
	}
	return ids
}

// BlockCount returns the number of blocks of all groups.
func BlockCount(blocks *pb.Blocks) (count int) {
	for _, group := range blocks.GetGroups() {
		for _, run := range group.GetRuns().GetCounts() {
			count += int(run)
		}
	}
	return count
}
