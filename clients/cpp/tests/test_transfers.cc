#include <atomic>

#include "server.h"

namespace kvgrpc::testing {
namespace {

struct Wait : WithServer {
  std::atomic<int> calls{0};
  Mailbox<v1::WaitTransferRequest> asked;
};

TEST_F(Wait, ALongWaitIsAskedForInPieces) {
  server.transfers.wait_transfer = [&](auto*, const auto& request, auto* reply) {
    asked.put(request);
    const bool met = ++calls == 3;
    reply->set_condition_met(met);
    reply->mutable_transfer()->set_transfer_id(request.transfer_id());
    return Status::OK;
  };
  const auto waited = wait(client(), "t", v1::WAIT_CONDITION_RETURNED, 1000s);
  EXPECT_TRUE(waited.condition_met);
  EXPECT_EQ(waited.transfer.transfer_id(), "t");
  for (int i = 0; i < 3; ++i) {
    const auto request = asked.take();
    EXPECT_EQ(request.until(), v1::WAIT_CONDITION_RETURNED);
    EXPECT_LE(from_duration(request.timeout()), 60s);
  }
}

TEST_F(Wait, AServerThatIsAwayInBetweenIsAskedAgain) {
  server.transfers.wait_transfer = [&](auto*, const auto&, auto* reply) {
    reply->set_condition_met(true);
    return ++calls <= 6 ? unavailable() : Status::OK;  // more often than gRPC retries
  };
  EXPECT_TRUE(wait(client(), "t", v1::WAIT_CONDITION_ENDED, kLong).condition_met);
  EXPECT_EQ(calls, 7);
}

TEST_F(Wait, WhatPassesAndWhatNoServerOfKvgrpcSaidIsAskedAgain) {
  const std::vector<Status> passing = {refusal(StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL"),
                                       refusal(StatusCode::DEADLINE_EXCEEDED, "DEADLINE"),
                                       Status(StatusCode::CANCELLED, "reset by a proxy"),
                                       Status(StatusCode::INTERNAL, "RST_STREAM"),
                                       Status(StatusCode::UNKNOWN, "no trailers")};
  server.transfers.wait_transfer = [&](auto*, const auto&, auto* reply) {
    reply->set_condition_met(true);
    const auto call = static_cast<std::size_t>(calls++);
    return call < passing.size() ? passing[call] : Status::OK;
  };
  EXPECT_TRUE(wait(client(), "t", v1::WAIT_CONDITION_ENDED, kLong).condition_met);
  EXPECT_EQ(calls, 6);
}

TEST_F(Wait, TheSameCodesWithAReasonEndTheWait) {
  for (const auto code : {StatusCode::CANCELLED, StatusCode::INTERNAL, StatusCode::UNKNOWN}) {
    calls = 0;
    server.transfers.wait_transfer = [&](auto*, const auto&, auto*) {
      ++calls;
      return refusal(code, "INTERNAL");
    };
    EXPECT_EQ(error_of([&] { wait(client(), "t", v1::WAIT_CONDITION_ENDED, kLong); }).code(), code);
    EXPECT_EQ(calls, 1);
  }
}

TEST_F(Wait, AServerThatDoesNotWaitIsNotAskedWithoutAPause) {
  server.transfers.wait_transfer = [&](auto*, const auto&, auto*) {
    ++calls;
    return Status::OK;
  };
  EXPECT_FALSE(wait(client(), "t", v1::WAIT_CONDITION_ENDED, 500ms).condition_met);
  EXPECT_LE(calls, 7);  // after 50, 100 and 200 ms or more, and a last call
}

TEST_F(Wait, TheLastLookOfAWaitWhoseTimeIsOverDoesNotWait) {
  server.transfers.wait_transfer = [&](auto*, const auto& request, auto* reply) {
    asked.put(request);
    reply->mutable_transfer()->set_state(v1::TRANSFER_STATE_ACTIVE);
    return Status::OK;
  };
  EXPECT_FALSE(wait(client(), "t", v1::WAIT_CONDITION_ENDED, 0s).condition_met);
  const auto request = asked.take();
  EXPECT_TRUE(request.has_timeout());
  EXPECT_EQ(from_duration(request.timeout()), 0s);
}

TEST_F(Wait, WhenTheTimeIsOverTheTransferIsAsItIs) {
  server.transfers.wait_transfer = [&](auto*, const auto& request, auto* reply) {
    std::this_thread::sleep_for(from_duration(request.timeout()));
    reply->mutable_transfer()->set_state(v1::TRANSFER_STATE_ACTIVE);
    return Status::OK;
  };
  const auto waited = wait(client(), "t", v1::WAIT_CONDITION_ENDED, 50ms);
  EXPECT_FALSE(waited.condition_met);
  EXPECT_EQ(waited.transfer.state(), v1::TRANSFER_STATE_ACTIVE);
}

TEST_F(Wait, WhenTheTimeIsOverAndTheServerAwayTheErrorSaysSo) {
  server.stop();
  const auto error = error_of([&] { wait(client(), "t", v1::WAIT_CONDITION_ENDED, 200ms); });
  EXPECT_EQ(error.code(), StatusCode::UNAVAILABLE);
}

TEST_F(Wait, ARefusalEndsTheWait) {
  server.transfers.wait_transfer = [&](auto*, const auto&, auto*) {
    ++calls;
    return refusal(StatusCode::NOT_FOUND, "TRANSFER_NOT_FOUND");
  };
  const auto error = error_of([&] { wait(client(), "t", v1::WAIT_CONDITION_ENDED, kLong); });
  EXPECT_TRUE(error.is(v1::FAILURE_REASON_TRANSFER_NOT_FOUND));
  EXPECT_EQ(calls, 1);
}

struct CleanUp : WithServer {
  Server other;
  CleanUp() { other.start(); }
};

TEST_F(CleanUp, BothSidesAreToldAtOnceWhatToCancelAndFree) {
  Mailbox<v1::CancelTransferRequest> here, there;
  Mailbox<bool> here_runs, there_runs;
  server.transfers.cancel_transfer = [&](auto*, const auto& request, auto* reply) {
    here.put(request);
    here_runs.put(true);
    there_runs.take();  // each answers only when the other one has been asked
    reply->set_outcome(v1::CANCEL_OUTCOME_ALREADY_ENDED);
    return Status::OK;
  };
  other.transfers.cancel_transfer = [&](auto*, const auto& request, auto* reply) {
    there.put(request);
    there_runs.put(true);
    here_runs.take();
    reply->set_outcome(v1::CANCEL_OUTCOME_TOMBSTONED);
    return Status::OK;
  };
  const std::vector<CleanUpSide> sides = {{client(), "key", "", {"a", "b"}}, {connect(other.address()), "", "t"}};
  const auto rows = clean_up(sides, "the client left");
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(outcome(*rows[0].reply), v1::CANCEL_OUTCOME_ALREADY_ENDED);
  EXPECT_EQ(outcome(*rows[1].reply), v1::CANCEL_OUTCOME_TOMBSTONED);
  const auto first = here.take();
  EXPECT_EQ(first.transfer_key(), "key");
  EXPECT_EQ(first.free_allocation_ids_size(), 2);
  EXPECT_EQ(first.message(), "the client left");
  EXPECT_EQ(first.idempotency_key().size(), 32U);
  EXPECT_EQ(there.take().transfer_id(), "t");
}

TEST_F(CleanUp, ASideThatFailsKeepsNoOtherFromBeingTold) {
  server.stop();
  other.transfers.cancel_transfer = [](auto*, const auto&, auto* reply) {
    reply->set_outcome(v1::CANCEL_OUTCOME_CANCELLED_BEFORE_ACCESS);
    return Status::OK;
  };
  const auto rows = clean_up({{client(), "key", ""}, {connect(other.address()), "key", ""}}, "");
  EXPECT_EQ(rows[0].error->code(), StatusCode::UNAVAILABLE);
  EXPECT_FALSE(rows[0].reply);
  EXPECT_EQ(outcome(*rows[1].reply), v1::CANCEL_OUTCOME_CANCELLED_BEFORE_ACCESS);
  EXPECT_FALSE(rows[1].error);
}

// Options whose function for a trace throws from its second call on.
Options traced() {
  Options options;
  options.traceparent = [asked = std::make_shared<std::atomic<int>>(0)]() -> std::string {
    if (++*asked > 1) throw std::runtime_error("no span");
    return "";
  };
  return options;
}

TEST_F(CleanUp, ASideWhoseClientThrowsKeepsNoOtherFromBeingTold) {
  server.transfers.cancel_transfer = other.transfers.cancel_transfer = [](auto*, const auto&, auto* reply) {
    reply->set_outcome(v1::CANCEL_OUTCOME_CANCELLED_BEFORE_ACCESS);
    return Status::OK;
  };
  const auto throwing = client(traced());
  EXPECT_FALSE(clean_up({{throwing, "key", ""}}, "")[0].error);
  const auto rows = clean_up({{throwing, "key", ""}, {connect(other.address()), "key", ""}}, "");
  EXPECT_EQ(rows[0].error->message(), "no span");
  EXPECT_TRUE(rows[1].reply);
}

struct Moves : CleanUp {
  Mailbox<v1::CancelTransferRequest> told;
  Moves() {
    other.pools.allocate_blocks = [](auto*, const auto&, auto* reply) {
      reply->mutable_blocks()->set_allocation_id("a-1");
      return Status::OK;
    };
    other.transfers.cancel_transfer = [this](auto*, const auto& request, auto*) {
      told.put(request);
      return Status::OK;
    };
  }
};

TEST_F(Moves, AMoveTellsWhyItFailedAlsoWhereItsCleanUpFails) {
  server.handoffs.finished_blocks = [](auto*, const auto&, auto*) {
    return refusal(StatusCode::ABORTED, "INCARNATION_CHANGED");
  };
  const auto error = error_of([&] { move(client(traced()), connect(other.address()), {}, {}); });
  EXPECT_TRUE(error.is(v1::FAILURE_REASON_INCARNATION_CHANGED));
  EXPECT_EQ(told.take().free_allocation_ids(0), "a-1");
}

TEST_F(Moves, AMoveWhoseClientThrowsLeavesNothingBehindEither) {
  const auto throwing = client(traced());
  error_of([&] { throwing.call(&PoolStub::FreeBlocks, v1::FreeBlocksRequest()); });
  EXPECT_THROW(move(throwing, connect(other.address()), {}, {}), std::runtime_error);
  EXPECT_EQ(told.take().free_allocation_ids(0), "a-1");
}

}  // namespace
}  // namespace kvgrpc::testing
