#include <atomic>
#include <thread>

#include "server.h"

namespace kvgrpc::testing {
namespace {

v1::WatchEngineResponse status_of(std::uint64_t incarnation) {
  v1::WatchEngineResponse message;
  *message.mutable_header() = header(1, incarnation);
  message.mutable_status()->set_admission(v1::ADMISSION_OPEN);
  return message;
}

struct WatchEngine : WithServer {
  std::atomic<int> streams{0};

  Client impatient(Nanoseconds silence) {
    Options options;
    options.engine_silence = silence;
    return client(options);
  }
};

// With a silence as short as in a test, the time may be over before a busy machine has opened the stream.
void await_message(EngineWatch& watch) {
  while (!watch.next(kLong).value().message) {
  }
}

TEST_F(WatchEngine, AnEngineThatIsLostIsToldOnceAndItsNextLifeFollows) {
  server.handshakes.watch_engine = [&](auto* context, const auto&, auto* writer) {
    writer->Write(status_of(++streams == 1 ? 7 : 8));
    return until_cancelled(context);
  };
  EngineWatch watch(client());
  EXPECT_EQ(watch.next(kLong)->message->header().incarnation(), 7U);
  server.stop();
  const auto lost = watch.next(kLong);
  EXPECT_FALSE(lost->message);
  ASSERT_TRUE(lost->unreachable);
  EXPECT_FALSE(watch.next(600ms));  // it has retried in the meantime, which is not reported
  server.start();
  const auto back = watch.next(kLong);
  ASSERT_TRUE(back->message);
  EXPECT_EQ(back->message->header().incarnation(), 8U);
}

TEST_F(WatchEngine, AnEngineThatWasNeverThereIsUnreachable) {
  server.stop();
  EngineWatch watch(client());
  EXPECT_EQ(watch.next(kLong)->unreachable->code(), StatusCode::UNAVAILABLE);
}

TEST_F(WatchEngine, ASilentEngineIsUnreachable) {
  server.handshakes.watch_engine = [&](auto* context, const auto&, auto* writer) {
    writer->Write(status_of(7));
    return until_cancelled(context);
  };
  EngineWatch watch(impatient(100ms));
  await_message(watch);
  EXPECT_TRUE(watch.next(kLong)->unreachable);
  await_message(watch);
}

TEST_F(WatchEngine, AReaderThatWasAwayFindsNoSilence) {
  Mailbox<bool> written;
  server.handshakes.watch_engine = [&](auto* context, const auto&, auto* writer) {
    writer->Write(status_of(7));
    writer->Write(status_of(7));
    written.put(true);
    return until_cancelled(context);
  };
  EngineWatch watch(impatient(100ms));
  await_message(watch);
  written.take();
  std::this_thread::sleep_for(150ms);  // longer than the allowed silence
  EXPECT_TRUE(watch.next(kLong)->message);
}

TEST_F(WatchEngine, TheIntervalIsAskedFor) {
  Mailbox<Nanoseconds> asked;
  server.handshakes.watch_engine = [&](auto* context, const auto& request, auto*) {
    asked.put(from_duration(request.min_interval()));
    return until_cancelled(context);
  };
  EngineWatch watch(client(), 2s);
  EXPECT_FALSE(watch.next(100ms));
  EXPECT_EQ(asked.take(), 2s);
}

TEST_F(WatchEngine, ARefusalIsAnError) {
  server.handshakes.watch_engine = [&](auto*, const auto&, auto*) {
    return refusal(StatusCode::INVALID_ARGUMENT, "INVALID_FIELD");
  };
  EngineWatch watch(client(), -1s);
  EXPECT_TRUE(error_of([&] { watch.next(kLong); }).is(v1::FAILURE_REASON_INVALID_FIELD));
}

TEST_F(WatchEngine, CancelEndsAReadThatWaits) {
  Mailbox<bool> opened;
  server.handshakes.watch_engine = [&](auto* context, const auto&, auto*) {
    opened.put(true);
    return until_cancelled(context);
  };
  EngineWatch watch(client());
  std::thread other([&] {
    opened.take();
    watch.cancel();
  });
  EXPECT_EQ(error_of([&] { watch.next(kLong); }).code(), StatusCode::CANCELLED);
  other.join();
}

}  // namespace
}  // namespace kvgrpc::testing
