#include <atomic>

#include "program.h"
#include "server.h"

namespace kvgrpc::testing {
namespace {

// Plays two servers of a pull, which ends in `end`.
struct Router : ::testing::Test {
  Server p, d;
  Mailbox<v1::CancelTransferRequest> cancelled;
  Mailbox<v1::FinishedBlocksRequest> finished;
  Mailbox<v1::PullBlocksRequest> pulled;
  std::atomic<int> freed{0};

  int run(v1::TransferState end) {
    for (Server* server : {&p, &d}) {
      server->start();
      serve(*server, end);
    }
    Program program(ROUTER, {p.address(), d.address(), "4"});
    while (!program.read().empty()) {
    }
    return program.end();
  }

  void serve(Server& server, v1::TransferState end) {
    server.handshakes.get_capabilities = [&server](auto*, const auto&, auto* reply) {
      reply->mutable_engine()->set_address(server.address());
      reply->mutable_engine()->mutable_pool()->add_groups()->set_block_tokens(16);
      return Status::OK;
    };
    server.handshakes.check_compatibility = [](auto*, const auto&, auto* reply) {
      reply->set_compatible(true);
      return Status::OK;
    };
    server.handshakes.connect_peer = [](auto*, const auto&, auto*) { return Status::OK; };
    server.pools.allocate_blocks = [](auto*, const auto&, auto* reply) {
      reply->mutable_blocks()->set_allocation_id("a");
      return Status::OK;
    };
    server.pools.free_blocks = [this](auto*, const auto& request, auto*) {
      EXPECT_EQ(request.allocation_id(), "a");
      ++freed;
      return Status::OK;
    };
    server.handoffs.finished_blocks = [this](auto*, const auto& request, auto* reply) {
      finished.put(request);
      reply->mutable_grant()->set_token("grant");
      return Status::OK;
    };
    server.handoffs.pull_blocks = [this](auto*, const auto& request, auto* reply) {
      pulled.put(request);
      *reply->mutable_header() = header(1);
      reply->mutable_transfer()->set_transfer_id("t");
      reply->mutable_transfer()->set_event_seq(1);
      return Status::OK;
    };
    server.transfers.watch_transfers = [end](auto* context, const auto&, auto* writer) {
      v1::WatchTransfersResponse change;
      *change.mutable_header() = header(2);
      change.mutable_transfer()->set_transfer_id("t");
      change.mutable_transfer()->set_state(end);
      change.mutable_transfer()->set_memory(v1::MEMORY_DISPOSITION_RETURNED);
      writer->Write(change);
      return until_cancelled(context);
    };
    server.transfers.wait_transfer = [](auto*, const auto&, auto* reply) {
      reply->set_condition_met(true);
      return Status::OK;
    };
    server.transfers.cancel_transfer = [this](auto*, const auto& request, auto*) {
      cancelled.put(request);
      return Status::OK;
    };
  }
};

TEST_F(Router, APullThatSucceedsGivesBackTheBlocksOfBothSides) {
  EXPECT_EQ(run(v1::TRANSFER_STATE_SUCCEEDED), 0);
  const auto key = finished.take().transfer_key();
  EXPECT_EQ(key.size(), 16U);
  const auto pull = pulled.take();
  EXPECT_EQ(pull.grant().token(), "grant");
  EXPECT_EQ(pull.transfer_key(), key);
  EXPECT_EQ(pull.content().tokens().token_ids_size(), 64);
  EXPECT_EQ(freed, 2);
  EXPECT_EQ(cancelled.size(), 0U);
}

TEST_F(Router, APullThatFailsIsCleanedUpAtBothSides) {
  EXPECT_EQ(run(v1::TRANSFER_STATE_FAILED), 1);
  const auto key = finished.take().transfer_key();
  for (int side = 0; side < 2; ++side) {
    const auto request = cancelled.take();
    EXPECT_EQ(request.transfer_key(), key);
    EXPECT_EQ(request.free_allocation_ids_size(), 1);
  }
}

}  // namespace
}  // namespace kvgrpc::testing
