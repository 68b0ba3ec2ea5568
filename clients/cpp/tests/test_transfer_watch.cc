#include <atomic>
#include <thread>

#include "server.h"

namespace kvgrpc::testing {
namespace {

v1::WatchTransfersResponse progress(std::uint64_t event_seq, std::uint64_t incarnation = 7) {
  v1::WatchTransfersResponse message;
  *message.mutable_header() = header(event_seq, incarnation);
  return message;
}

v1::WatchTransfersResponse change(std::uint64_t event_seq, const std::string& id = "t") {
  auto message = progress(event_seq);
  message.mutable_transfer()->set_transfer_id(id);
  message.mutable_transfer()->set_event_seq(event_seq);
  return message;
}

struct Watch : WithServer {
  Mailbox<v1::WatchTransfersRequest> asked;

  // Lets the n-th stream do what the n-th of `streams` does. The last one also plays all later streams.
  using Stream = std::function<Status(ServerContext*, grpc::ServerWriter<v1::WatchTransfersResponse>*)>;
  void serve(std::vector<Stream> streams) {
    server.transfers.watch_transfers = [this, streams, opened = std::make_shared<std::atomic<std::size_t>>(0)](
                                           auto* context, const auto& request, auto* writer) {
      asked.put(request);
      return streams[std::min((*opened)++, streams.size() - 1)](context, writer);
    };
  }
  static Stream tell(std::vector<v1::WatchTransfersResponse> messages, std::optional<Status> end = std::nullopt) {
    return [messages, end](auto* context, auto* writer) {
      for (const auto& message : messages) writer->Write(message);
      return end ? *end : until_cancelled(context);
    };
  }
};

TEST_F(Watch, ABrokenStreamIsResumedAfterTheLastMessage) {
  serve({tell({progress(4), change(5), progress(9)}, unavailable()), tell({progress(9), change(10)})});
  TransferWatch watch(client());
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 5U);
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 10U);
  EXPECT_EQ(asked.take().incarnation(), 0U);
  const auto resumed = asked.take();
  EXPECT_EQ(resumed.after_event_seq(), 9U);  // this includes a message without a transfer
  EXPECT_EQ(resumed.incarnation(), 7U);
  EXPECT_EQ(watch.position().event_seq, 10U);
}

TEST_F(Watch, AMessageThatIsTooLongEndsTheWatch) {
  serve({tell({change(1, std::string(5 << 20, 'x'))})});  // longer than a client accepts
  TransferWatch watch(client());
  EXPECT_EQ(error_of([&] { watch.next(kLong); }).code(), StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(Watch, AStreamThatTheServerOrAProxyEndsIsResumedToo) {
  serve({tell({change(5)}, Status::OK), tell({change(6)}, Status::CANCELLED),
         tell({change(7)}, Status(StatusCode::INTERNAL, "reset")), tell({change(8)})});
  TransferWatch watch(client());
  for (const auto seq : {5U, 6U, 7U, 8U}) EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), seq);
}

TEST_F(Watch, ALifeWithoutEventsIsResumedByItsIncarnation) {
  serve({tell({progress(0)}, unavailable()), tell({change(1)})});
  TransferWatch watch(client());
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 1U);
  asked.take();
  EXPECT_EQ(asked.take().incarnation(), 7U);
}

TEST_F(Watch, AWatchOutlivesItsServersRestart) {
  serve({tell({change(5)}), tell({change(6)})});
  TransferWatch watch(client());
  watch.next(kLong);
  std::thread restart([this] {
    server.stop();
    server.start();
  });
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 6U);
  restart.join();
}

TEST_F(Watch, AChangeIsToldOnce) {
  serve({tell({change(5)}, unavailable()), tell({change(5), change(6)})});
  TransferWatch watch(client());
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 5U);
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 6U);
}

TEST_F(Watch, FilterAndPositionOfTheCallerAreAskedFor) {
  serve({tell({change(43)})});
  v1::TransferFilter filter;
  filter.set_request_id("r");
  TransferWatch watch(client(), filter, {42, 7});
  watch.next(kLong);
  const auto request = asked.take();
  EXPECT_EQ(request.filter().request_id(), "r");
  EXPECT_EQ(request.after_event_seq(), 42U);
  EXPECT_EQ(request.incarnation(), 7U);
}

TEST_F(Watch, LostHistoryIsToldAndTheWatchGoesOn) {
  auto lost = progress(50);
  lost.set_history_lost(true);
  serve({tell({lost, change(51)})});
  TransferWatch watch(client(), {}, {3, 7});
  EXPECT_TRUE(watch.next(kLong)->history_lost());
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 51U);
}

TEST_F(Watch, TheEndOfTheLifeIsAnError) {
  serve({tell({change(5)}, refusal(StatusCode::ABORTED, "INCARNATION_CHANGED"))});
  TransferWatch watch(client());
  watch.next(kLong);
  const auto error = error_of([&] { watch.next(kLong); });
  EXPECT_EQ(error.code(), StatusCode::ABORTED);
  EXPECT_TRUE(error.is(v1::FAILURE_REASON_INCARNATION_CHANGED));
}

TEST_F(Watch, AMessageOfAnotherLifeIsAnErrorToo) {
  serve({tell({progress(5, 7)}, unavailable()), tell({progress(1, 8)})});
  TransferWatch watch(client());
  const auto error = error_of([&] { watch.next(kLong); });
  EXPECT_EQ(error.code(), StatusCode::ABORTED);
  EXPECT_TRUE(error.is(v1::FAILURE_REASON_INCARNATION_CHANGED));
  EXPECT_EQ(error.next(), v1::NEXT_STEP_RECOMPUTE);
}

TEST_F(Watch, ARefusalIsAnError) {
  serve({tell({}, refusal(StatusCode::INVALID_ARGUMENT, "INVALID_FIELD")),
         tell({}, refusal(StatusCode::INTERNAL, "INTERNAL_DEFECT"))});
  TransferWatch watch(client());
  EXPECT_TRUE(error_of([&] { watch.next(kLong); }).is(v1::FAILURE_REASON_INVALID_FIELD));
  EXPECT_TRUE(error_of([&] { watch.next(kLong); }).is(v1::FAILURE_REASON_INTERNAL_DEFECT));
}

TEST_F(Watch, PausesBetweenStreamsGrow) {
  serve({tell({}, unavailable()), tell({}, unavailable()), tell({}, unavailable()), tell({change(1)})});
  const auto began = Clock::now();
  TransferWatch watch(client());
  watch.next(kLong);
  EXPECT_GE(Clock::now() - began, 50ms + 100ms + 200ms);  // the least of 0.1, 0.2 and 0.4 s with their jitter
}

TEST_F(Watch, TheServersRetryDelayCounts) {
  client::RetryInfo retry;
  *retry.mutable_retry_delay() = to_duration(400ms);
  client::Status details;
  auto& any = *details.add_details();
  any.set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  any.set_value(retry.SerializeAsString());
  serve({tell({}, Status(StatusCode::RESOURCE_EXHAUSTED, "slow", details.SerializeAsString())), tell({change(1)})});
  const auto began = Clock::now();
  TransferWatch watch(client());
  watch.next(kLong);
  EXPECT_GE(Clock::now() - began, 400ms);
}

TEST_F(Watch, AStreamWhoseTimeIsOverIsFollowedByTheNext) {
  serve({tell({change(5)}), tell({change(6)})});
  Options options;
  options.watch_stream_timeout = 100ms;
  TransferWatch watch(client(options));
  watch.next(kLong);
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 6U);
  EXPECT_FALSE(watch.interruption());
}

TEST_F(Watch, NothingIsReturnedWhenTheTimeIsOverAndNothingIsLost) {
  Mailbox<bool> go;
  serve({[&](auto* context, auto* writer) {
    writer->Write(progress(4));
    go.take();
    writer->Write(change(5));
    return until_cancelled(context);
  }});
  TransferWatch watch(client());
  EXPECT_FALSE(watch.next(50ms));
  EXPECT_FALSE(watch.next(0ms));
  go.put(true);
  EXPECT_EQ(watch.next(kLong)->transfer().event_seq(), 5U);
  EXPECT_EQ(asked.size(), 1U);
}

TEST_F(Watch, AnInterruptionIsVisible) {
  server.stop();
  TransferWatch watch(client());
  EXPECT_FALSE(watch.next(500ms));
  ASSERT_TRUE(watch.interruption());
  EXPECT_EQ(watch.interruption()->code(), StatusCode::UNAVAILABLE);
}

TEST_F(Watch, CancelEndsAReadThatWaits) {
  Mailbox<bool> opened;
  serve({[&](auto* context, auto*) {
    opened.put(true);
    return until_cancelled(context);
  }});
  TransferWatch watch(client());
  std::thread other([&] {
    opened.take();
    watch.cancel();
  });
  EXPECT_EQ(error_of([&] { watch.next(kLong); }).code(), StatusCode::CANCELLED);
  other.join();
}

TEST_F(Watch, CancelEndsAPauseThatWaits) {
  Mailbox<bool> refused;
  serve({[&](auto*, auto*) {
    refused.put(true);
    return unavailable();
  }});
  TransferWatch watch(client());
  std::thread other([&] {
    for (int i = 0; i < 3; ++i) refused.take();
    watch.cancel();
  });
  EXPECT_EQ(error_of([&] { watch.next(kLong); }).code(), StatusCode::CANCELLED);
  other.join();
}

}  // namespace
}  // namespace kvgrpc::testing
