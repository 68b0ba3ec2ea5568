#include <atomic>

#include "server.h"

namespace kvgrpc::testing {
namespace {

struct Calls : WithServer {
  // Returns the seconds until the deadline of a call, as its server sees them.
  Mailbox<double> left_s;
  std::atomic<int> attempts{0};

  template <class Reply>
  auto tell_deadline() {
    return [this](ServerContext* context, auto&, Reply*) {
      left_s.put(std::chrono::duration<double>(context->deadline() - std::chrono::system_clock::now()).count());
      return Status::OK;
    };
  }
  template <class... Arguments>
  auto fail(Status status) {
    return [this, status](Arguments...) {
      ++attempts;
      return status;
    };
  }
};

TEST_F(Calls, ACallHasADeadlineOfTenSeconds) {
  server.handshakes.get_capabilities = tell_deadline<v1::GetCapabilitiesResponse>();
  client().call(&HandshakeStub::GetCapabilities, v1::GetCapabilitiesRequest());
  EXPECT_NEAR(left_s.take(), 10, 2);
}

TEST_F(Calls, ACallThatWaitsHasTheWaitAndTenSeconds) {
  server.transfers.wait_transfer = tell_deadline<v1::WaitTransferResponse>();
  server.transfers.wait_transfers = tell_deadline<v1::WaitTransfersResponse>();
  server.schedulers.poll_scheduler_news = tell_deadline<v1::PollSchedulerNewsResponse>();
  v1::WaitTransferRequest one;
  client().call(&TransferStub::WaitTransfer, one);  // unset: the server's longest
  EXPECT_NEAR(left_s.take(), 70, 2);
  one.mutable_timeout()->set_seconds(1000);
  client().call(&TransferStub::WaitTransfer, one);
  EXPECT_NEAR(left_s.take(), 70, 2);
  v1::WaitTransfersRequest many;
  many.mutable_timeout()->set_seconds(20);
  client().call(&TransferStub::WaitTransfers, many);
  EXPECT_NEAR(left_s.take(), 30, 2);
  v1::PollSchedulerNewsRequest news;
  client().call(&SchedulerStub::PollSchedulerNews, news);  // unset: it does not wait
  EXPECT_NEAR(left_s.take(), 10, 2);
  news.mutable_wait()->set_seconds(30);
  client().call(&SchedulerStub::PollSchedulerNews, news);
  EXPECT_NEAR(left_s.take(), 40, 2);
}

TEST_F(Calls, ATensorThatIsPutOrWantedHasItsTimeAtTheServer) {
  const Options options;
  const auto seconds = [&](const auto& request) {
    return std::chrono::duration_cast<std::chrono::seconds>(detail::timeout_of(request, options)).count();
  };
  v1::GetTensorRequest get;
  v1::PutTensorRequest put;
  EXPECT_EQ(seconds(get), 70);
  EXPECT_EQ(seconds(put), 130);
  get.mutable_timeout()->set_seconds(5);
  put.mutable_timeout()->set_seconds(5);
  EXPECT_EQ(seconds(get), 15);
  EXPECT_EQ(seconds(put), 15);
  put.mutable_timeout()->set_seconds(3600);
  EXPECT_EQ(seconds(put), 610);
}

TEST_F(Calls, ConnectPeerHasSixtySeconds) {
  server.handshakes.connect_peer = tell_deadline<v1::ConnectPeerResponse>();
  client().call(&HandshakeStub::ConnectPeer, v1::ConnectPeerRequest());
  EXPECT_NEAR(left_s.take(), 60, 2);
}

TEST_F(Calls, ReleaseQuarantineHasSixtySecondsOrMore) {
  server.admins.release_quarantine = tell_deadline<v1::ReleaseQuarantineResponse>();
  client().call(&AdminStub::ReleaseQuarantine, v1::ReleaseQuarantineRequest());
  EXPECT_NEAR(left_s.take(), 60, 2);
  Options options;
  options.call_timeout = 100s;
  client(options).call(&AdminStub::ReleaseQuarantine, v1::ReleaseQuarantineRequest());
  EXPECT_NEAR(left_s.take(), 100, 2);
}

TEST_F(Calls, ATimeoutOfTheCallCountsAndEndsAsDeadlineExceeded) {
  server.handshakes.get_capabilities = [](ServerContext* context, auto&, auto*) { return until_cancelled(context); };
  CallOptions options;
  options.timeout = 50ms;
  const auto error = error_of(
      [&] { client().call(&HandshakeStub::GetCapabilities, v1::GetCapabilitiesRequest(), options); });
  EXPECT_EQ(error.code(), StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(Calls, UnavailableIsRepeatedWithTheSameRandomKey) {
  Mailbox<std::string> keys;
  server.pools.allocate_blocks = [&](auto*, const v1::AllocateBlocksRequest& request, auto*) {
    keys.put(request.idempotency_key());
    return ++attempts < 3 ? unavailable() : Status::OK;
  };
  client().call(&PoolStub::AllocateBlocks, v1::AllocateBlocksRequest());
  const auto first = keys.take();
  EXPECT_EQ(first.size(), 32U);
  EXPECT_EQ(keys.take(), first);
  EXPECT_EQ(keys.take(), first);
  client().call(&PoolStub::AllocateBlocks, v1::AllocateBlocksRequest());
  EXPECT_NE(keys.take(), first);
}

TEST_F(Calls, AKeyOfTheCallerIsKept) {
  Mailbox<std::string> keys;
  server.pools.allocate_blocks = [&](auto*, const v1::AllocateBlocksRequest& request, auto*) {
    keys.put(request.idempotency_key());
    return Status::OK;
  };
  v1::AllocateBlocksRequest request;
  request.set_idempotency_key("mine");
  client().call(&PoolStub::AllocateBlocks, request);
  EXPECT_EQ(keys.take(), "mine");
}

TEST_F(Calls, NothingButUnavailableIsRepeated) {
  for (const auto code : {StatusCode::RESOURCE_EXHAUSTED, StatusCode::ABORTED, StatusCode::INTERNAL}) {
    attempts = 0;
    server.pools.allocate_blocks = [this, code](auto*, auto&, auto*) {
      ++attempts;
      return Status(code, "no");
    };
    EXPECT_EQ(error_of([&] { client().call(&PoolStub::AllocateBlocks, v1::AllocateBlocksRequest()); }).code(), code);
    EXPECT_EQ(attempts, 1);
  }
}

TEST_F(Calls, ConnectPeerIsNotRepeated) {
  server.handshakes.connect_peer = fail<ServerContext*, const v1::ConnectPeerRequest&, v1::ConnectPeerResponse*>(
      unavailable());
  error_of([&] { client().call(&HandshakeStub::ConnectPeer, v1::ConnectPeerRequest()); });
  EXPECT_EQ(attempts, 1);
}

TEST_F(Calls, NoStreamIsRepeatedByGrpc) {
  const auto refuse = [this](auto*...) {
    ++attempts;
    return unavailable();
  };
  server.handshakes.watch_engine = [&](auto* context, auto&, auto* writer) { return refuse(context, writer); };
  server.transfers.watch_transfers = [&](auto* context, auto&, auto* writer) { return refuse(context, writer); };
  server.leases.keep_alive = refuse;
  server.schedulers.schedule = refuse;
  const auto served = client();
  const auto status_of = [&](auto open) {
    grpc::ClientContext context;
    served.prepare(context, {}, kLong);
    return open(&context)->Finish().error_code();
  };
  using grpc::ClientContext;
  const auto code = StatusCode::UNAVAILABLE;
  EXPECT_EQ(status_of([&](ClientContext* c) { return served.stub<HandshakeStub>()->WatchEngine(c, {}); }), code);
  EXPECT_EQ(status_of([&](ClientContext* c) { return served.stub<TransferStub>()->WatchTransfers(c, {}); }), code);
  EXPECT_EQ(status_of([&](ClientContext* c) { return served.stub<LeaseStub>()->KeepAlive(c); }), code);
  EXPECT_EQ(status_of([&](ClientContext* c) { return served.stub<SchedulerStub>()->Schedule(c); }), code);
  EXPECT_EQ(attempts, 4);
}

TEST_F(Calls, TraceAndMetadataGoWithEveryCall) {
  Mailbox<std::string> seen;
  server.handshakes.get_capabilities = [&](ServerContext* context, auto&, auto*) {
    seen.put(metadata_of(*context, "traceparent") + " " + metadata_of(*context, "authorization") + " " +
             metadata_of(*context, "x-more"));
    return Status::OK;
  };
  Options options;
  options.traceparent = [] { return "00-of-client"; };
  options.metadata = {{"authorization", "Bearer x"}};
  const auto traced = client(options);
  traced.call(&HandshakeStub::GetCapabilities, v1::GetCapabilitiesRequest());
  EXPECT_EQ(seen.take(), "00-of-client Bearer x ");
  CallOptions call;
  call.traceparent = "00-of-call";
  call.metadata = {{"x-more", "1"}};
  traced.call(&HandshakeStub::GetCapabilities, v1::GetCapabilitiesRequest(), call);
  EXPECT_EQ(seen.take(), "00-of-call Bearer x 1");
  client().call(&HandshakeStub::GetCapabilities, v1::GetCapabilitiesRequest());
  EXPECT_EQ(seen.take(), "  ");
}

}  // namespace
}  // namespace kvgrpc::testing
