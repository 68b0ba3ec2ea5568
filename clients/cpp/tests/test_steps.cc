#include <atomic>

#include "server.h"

namespace kvgrpc::testing {
namespace {

struct StepsTest : WithServer {
  Mailbox<v1::ScheduleRequest> seen;
  std::atomic<int> streams{0};
  std::string traceparents;
  std::string authorizations;

  // Answers each step, with the number of the stream as its only news, unless `ends` returns a status.
  using Ends = std::function<std::optional<Status>(const v1::ScheduleRequest& step, int stream)>;
  void serve(Ends ends = [](auto&, int) { return std::nullopt; }) {
    server.schedulers.schedule = [this, ends](ServerContext* context, auto* stream) {
      const int number = ++streams;
      traceparents += metadata_of(*context, "traceparent");
      authorizations += metadata_of(*context, "authorization");
      v1::ScheduleRequest step;
      while (stream->Read(&step)) {
        seen.put(step);
        if (const auto end = ends(step, number)) return *end;
        v1::ScheduleResponse reply;
        reply.add_news()->set_seq(static_cast<std::uint64_t>(number));
        stream->Write(reply);
      }
      return Status::OK;
    };
  }
};

v1::ScheduleRequest numbered(std::uint64_t seq) {
  v1::ScheduleRequest step;
  step.set_after_seq(seq);
  return step;
}

std::uint64_t stream_of(const v1::ScheduleResponse& reply) { return reply.news(0).seq(); }

TEST_F(StepsTest, StepsGoOverOneStream) {
  serve();
  Steps steps(client());
  for (std::uint64_t seq = 1; seq < 4; ++seq) {
    EXPECT_EQ(stream_of(steps.step(numbered(seq))), 1U);
    EXPECT_EQ(seen.take().after_seq(), seq);
  }
}

TEST_F(StepsTest, TheStreamCarriesTheTokenOfTheClient) {
  serve();
  Options options;
  options.token = "t";
  Steps steps(client(options));
  steps.step(numbered(1));
  EXPECT_EQ(authorizations, "Bearer t");
}

TEST_F(StepsTest, AStepWhoseStreamIsLostIsSentAgainOverAnother) {
  serve([](auto&, int stream) { return stream < 3 ? std::optional(Status::OK) : std::nullopt; });
  Steps steps(client());
  EXPECT_EQ(stream_of(steps.step(numbered(7))), 3U);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(seen.take().after_seq(), 7U);
  server.stop();
  server.start();
  EXPECT_GT(stream_of(steps.step(numbered(8))), 3U);
}

TEST_F(StepsTest, ARefusedStepIsRepeatedOnlyWhereThatMayHelp) {
  serve([](const auto& step, int) {
    return std::optional(step.after_seq() ? refusal(StatusCode::UNAVAILABLE, "NO_POOL")
                                          : refusal(StatusCode::ABORTED, "INCARNATION_CHANGED"));
  });
  Steps steps(client());
  const auto refused = error_of([&] { steps.step(numbered(0)); });
  EXPECT_EQ(refused.reason(), v1::FAILURE_REASON_INCARNATION_CHANGED);
  EXPECT_EQ(refused.method(), "SchedulerService/Schedule");
  EXPECT_EQ(streams, 1);
  EXPECT_EQ(error_of([&] { steps.step(numbered(1)); }).reason(), v1::FAILURE_REASON_NO_POOL);
  EXPECT_EQ(streams, 5);
}

TEST_F(StepsTest, AStepThatIsLateLeavesNoAnswerToTheNext) {
  Mailbox<bool> go;
  serve([&go](const auto& step, int) -> std::optional<Status> {
    if (step.after_seq()) go.take();
    return std::nullopt;
  });
  Steps steps(client());
  EXPECT_EQ(error_of([&] { steps.step(numbered(1), 50ms); }).code(), StatusCode::DEADLINE_EXCEEDED);
  go.put(true);
  EXPECT_EQ(stream_of(steps.step(numbered(0))), 2U);
}

TEST_F(StepsTest, AStepWaitsForEarlierOnesWithinItsDeadline) {
  Mailbox<bool> go;
  serve([&go](const auto& step, int) -> std::optional<Status> {
    if (step.after_seq()) go.take();
    return std::nullopt;
  });
  Steps steps(client());
  std::thread first([&] { EXPECT_EQ(stream_of(steps.step(numbered(1))), 1U); });
  seen.take();
  EXPECT_EQ(error_of([&] { steps.step(numbered(0), 50ms); }).code(), StatusCode::DEADLINE_EXCEEDED);
  go.put(true);
  first.join();
  EXPECT_EQ(stream_of(steps.step(numbered(0))), 1U);
}

TEST_F(StepsTest, TheTraceOfAStepIsThatOfTheRequestsThatArriveInIt) {
  serve();
  v1::ScheduleRequest step;
  step.add_calls()->mutable_request_arrived();
  step.add_calls()->mutable_request_arrived()->set_traceparent("own");
  Options options;
  options.traceparent = [] { return "00-of-client"; };
  Steps(client(options)).step(step);
  const auto told = seen.take();
  EXPECT_EQ(told.calls(0).request_arrived().traceparent(), "00-of-client");
  EXPECT_EQ(told.calls(1).request_arrived().traceparent(), "own");
  EXPECT_EQ(traceparents, "");
  CallOptions call;
  call.traceparent = "00-of-steps";
  Steps(client(options), call).step(step);
  EXPECT_EQ(seen.take().calls(0).request_arrived().traceparent(), "00-of-steps");
}

}  // namespace
}  // namespace kvgrpc::testing
