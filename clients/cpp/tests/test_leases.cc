#include <atomic>
#include <thread>

#include "server.h"

namespace kvgrpc::testing {
namespace {

v1::RenewedLease live(Nanoseconds remaining) {
  v1::RenewedLease row;
  *row.mutable_remaining() = to_duration(remaining);
  row.set_state(v1::LEASE_STATE_LIVE);
  return row;
}

v1::RenewedLease over(v1::LeaseState state, v1::FailureReason reason) {
  v1::RenewedLease row;
  row.set_state(state);
  row.set_reason(reason);
  return row;
}

struct KeepAlive : WithServer {
  struct Renewal {
    v1::KeepAliveRequest request;
    Clock::time_point at;
    int stream;
  };
  Mailbox<Renewal> renewals;
  std::atomic<int> streams{0};

  // Answers each row with what `answer` returns for its lease. Nothing ends the stream as UNAVAILABLE.
  using Answer = std::function<std::optional<v1::RenewedLease>(const std::string& lease_id, int renewal)>;
  void serve(Answer answer) {
    server.leases.keep_alive = [this, answer, count = std::make_shared<std::atomic<int>>(0)](auto*, auto* stream) {
      const int number = ++streams;
      v1::KeepAliveRequest request;
      while (stream->Read(&request)) {
        renewals.put({request, Clock::now(), number});
        v1::KeepAliveResponse reply;
        const int renewal = ++*count;
        for (const auto& ref : request.leases()) {
          const auto row = answer(ref.lease_id(), renewal);
          if (!row) return unavailable();
          *reply.add_leases() = *row;
        }
        stream->Write(reply);
      }
      return Status::OK;
    };
  }
  LeaseKeeper keeper(const std::vector<std::string>& ids, std::optional<Nanoseconds> ttl = std::nullopt,
                     LeaseKeeper::OnOver on_over = {}) {
    std::vector<v1::LeaseRef> leases;
    for (const auto& id : ids) leases.push_back(lease_ref(id));
    return LeaseKeeper(client(), leases, ttl, std::move(on_over));
  }
};

TEST_F(KeepAlive, LeasesAreRenewedAtAThirdOfWhatIsLeftOverOneStream) {
  serve([](auto&, int) { return live(900ms); });
  auto kept = keeper({"a", "b"});
  const auto first = renewals.take();
  EXPECT_EQ(first.request.leases_size(), 2);
  const auto second = renewals.take();
  EXPECT_GE(second.at - first.at, 280ms);
  EXPECT_EQ(renewals.take().stream, 1);
  EXPECT_EQ(kept.status(1).state, v1::LEASE_STATE_LIVE);
  EXPECT_FALSE(kept.status(1).over);
}

TEST_F(KeepAlive, TheTtlIsThatOfTheCallerOrNone) {
  serve([](auto&, int) { return live(60s); });
  auto with = keeper({"a"}, 7s);
  EXPECT_EQ(from_duration(renewals.take().request.ttl()), 7s);
  auto without = keeper({"a"});
  EXPECT_FALSE(renewals.take().request.has_ttl());
}

TEST_F(KeepAlive, ALeaseThatIsOverLeavesTheRenewalsAndIsToldOnce) {
  serve([](const auto& id, int) {
    return id == "a" ? over(v1::LEASE_STATE_DONE, v1::FAILURE_REASON_LEASE_RELEASED) : live(300ms);
  });
  Mailbox<std::pair<std::size_t, LeaseStatus>> told;
  auto kept = keeper({"a", "b"}, std::nullopt, [&](auto index, const auto& status) { told.put({index, status}); });
  const auto [index, status] = told.take();
  EXPECT_EQ(index, 0U);
  EXPECT_EQ(status.state, v1::LEASE_STATE_DONE);
  EXPECT_EQ(status.reason, v1::FAILURE_REASON_LEASE_RELEASED);
  EXPECT_TRUE(status.over);
  EXPECT_EQ(renewals.take().request.leases_size(), 2);
  for (int i = 0; i < 3; ++i) {
    const auto renewal = renewals.take();
    ASSERT_EQ(renewal.request.leases_size(), 1);
    EXPECT_EQ(renewal.request.leases(0).lease_id(), "b");
  }
  EXPECT_EQ(told.size(), 0U);
  EXPECT_EQ(kept.wait_over(0, 0s).state, v1::LEASE_STATE_DONE);
}

TEST_F(KeepAlive, WaitingReturnsAsSoonAsTheLeaseIsOverElseWhatIsKnown) {
  Mailbox<bool> go;
  serve([&](const auto&, int renewal) {
    if (renewal == 1) return live(300ms);
    go.take();
    return over(v1::LEASE_STATE_RELEASED, v1::FAILURE_REASON_LEASE_RELEASED);
  });
  auto kept = keeper({"a"});
  EXPECT_FALSE(kept.wait_over(0, 50ms).over);
  go.put(true);
  EXPECT_EQ(kept.wait_over(0, kLong).state, v1::LEASE_STATE_RELEASED);
}

TEST_F(KeepAlive, ALeaseThatIsUnknownIsOver) {
  serve([](auto&, int) { return over(v1::LEASE_STATE_UNSPECIFIED, v1::FAILURE_REASON_LEASE_NOT_FOUND); });
  auto kept = keeper({"a"});
  const auto status = kept.wait_over(0, kLong);
  EXPECT_TRUE(status.over);
  EXPECT_EQ(status.reason, v1::FAILURE_REASON_LEASE_NOT_FOUND);
}

TEST_F(KeepAlive, AnUnknownStateIsNotAnEnd) {
  serve([](auto&, int) {
    auto row = live(300ms);
    row.set_state(static_cast<v1::LeaseState>(900));
    return row;
  });
  auto kept = keeper({"a"});
  for (int i = 0; i < 3; ++i) renewals.take();
  EXPECT_FALSE(kept.status(0).over);
}

TEST_F(KeepAlive, ABrokenStreamIsOpenedAgain) {
  serve([](auto&, int renewal) { return renewal == 2 ? std::nullopt : std::optional(live(600ms)); });
  auto kept = keeper({"a"});
  EXPECT_EQ(renewals.take().stream, 1);
  EXPECT_EQ(renewals.take().stream, 1);
  EXPECT_EQ(renewals.take().stream, 2);
  EXPECT_FALSE(kept.status(0).over);
}

TEST_F(KeepAlive, ALeaseThatCannotBeRenewedInTimeIsExpired) {
  serve([](auto&, int) { return live(600ms); });
  auto kept = keeper({"a"});
  renewals.take();
  server.stop();
  const auto status = kept.wait_over(0, kLong);
  EXPECT_EQ(status.state, v1::LEASE_STATE_EXPIRED);
  EXPECT_EQ(status.reason, v1::FAILURE_REASON_LEASE_EXPIRED);
}

TEST_F(KeepAlive, WhatTheServerRefusesIsToldOfEveryLease) {
  server.leases.keep_alive = [this](auto*, auto*) {
    ++streams;
    return refusal(StatusCode::INVALID_ARGUMENT, "TTL_INVALID");
  };
  auto kept = keeper({"a", "b"}, -1s);
  for (const std::size_t index : {0U, 1U}) {
    const auto status = kept.wait_over(index, kLong);
    EXPECT_TRUE(status.over);
    EXPECT_EQ(status.reason, v1::FAILURE_REASON_TTL_INVALID);
  }
  EXPECT_EQ(streams, 1);
}

// The first renewal of the first stream is answered, and the second is not.
struct SilentOnce : KeepAlive {
  void serve_once(Nanoseconds left, bool again) {
    server.leases.keep_alive = [this, left, again](auto* context, auto* stream) {
      const int number = ++streams;
      v1::KeepAliveRequest request;
      while (stream->Read(&request)) {
        renewals.put({request, Clock::now(), number});
        v1::KeepAliveResponse reply;
        *reply.add_leases() = live(left);
        if (number == 1 || again) stream->Write(reply);
        if (number == 1 && stream->Read(&request)) {
          renewals.put({request, Clock::now(), number});
          return until_cancelled(context);
        }
      }
      return Status::OK;
    };
  }
};

TEST_F(SilentOnce, AShortLeaseHasTimeForAnotherAttempt) {
  serve_once(1500ms, true);
  auto kept = keeper({"a"});
  const auto granted = renewals.take();
  EXPECT_EQ(renewals.take().stream, 1);
  const auto again = renewals.take();
  EXPECT_EQ(again.stream, 2);
  EXPECT_LT(again.at - granted.at, 1500ms);
  EXPECT_EQ(renewals.take().stream, 2);
  EXPECT_FALSE(kept.status(0).over);
}

TEST_F(SilentOnce, AShortLeaseIsNotLiveAfterItsEnd) {
  serve_once(600ms, false);
  auto kept = keeper({"a"});
  const auto granted = renewals.take();
  const auto status = kept.wait_over(0, kLong);
  EXPECT_EQ(status.state, v1::LEASE_STATE_EXPIRED);
  EXPECT_LT(Clock::now() - granted.at, 2s);
}

struct Stopping : KeepAlive {
  Mailbox<bool> asked, ended;
  Stopping() {
    server.leases.keep_alive = [this](auto*, auto* stream) {
      v1::KeepAliveRequest request;
      while (stream->Read(&request)) asked.put(true);
      ended.put(true);
      return Status::OK;
    };
  }
  ~Stopping() override { server.stop(); }  // its streams write to the mailboxes
};

TEST_F(Stopping, EndsTheStreamAndNoLease) {
  auto kept = keeper({"a"});
  asked.take();
  kept.stop();
  ended.take();
  EXPECT_FALSE(kept.status(0).over);
  kept = keeper({"b"});
  asked.take();
  kept = keeper({"c"});
  ended.take();
}

TEST_F(Stopping, EndsAWaitForTheEndOfALease) {
  auto kept = keeper({"a"});
  asked.take();
  const auto began = Clock::now();
  Mailbox<LeaseStatus> told;
  std::thread waiting([&] { told.put(kept.wait_over(0, kLong)); });
  std::this_thread::sleep_for(50ms);  // the wait has begun by now
  kept.stop();
  EXPECT_FALSE(told.take().over);
  waiting.join();
  EXPECT_FALSE(kept.wait_over(0, kLong).over);
  EXPECT_LT(Clock::now() - began, kLong / 2);
}

}  // namespace
}  // namespace kvgrpc::testing
