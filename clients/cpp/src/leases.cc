#include "kvgrpc/leases.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "kvgrpc/states.h"
#include "pause.h"
#include "stream.h"

namespace kvgrpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using KeepAliveStream =
    detail::Stream<grpc::ClientAsyncReaderWriter<v1::KeepAliveRequest, v1::KeepAliveResponse>, v1::KeepAliveResponse>;

// Renewals that are due within this time are sent with one that is due now.
constexpr milliseconds kTogether(250);
// Shortest time between two renewals of a lease, even when its cap leaves it little time, and shortest wait for an
// answer.
constexpr milliseconds kShortest(100);
// Longest wait for an answer before the stream is given up.
constexpr seconds kAnswer(5);
// Largest number of leases in one message. A server takes 10,000, but at most 4 MB, and a grant has up to 700 bytes.
constexpr std::size_t kBatch = 5'000;

// Returns whether every other stream with these leases would be refused as well.
bool is_refusal(const Error& error) {
  switch (error.code()) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::OUT_OF_RANGE:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::UNIMPLEMENTED:
      return true;
    default:
      return false;
  }
}

struct Kept {
  v1::LeaseRef ref;
  LeaseStatus status = {};
  Clock::time_point due = {};
  // Unknown before the first answer.
  std::optional<Clock::time_point> left_until = {};
};

}  // namespace

v1::LeaseRef lease_ref(const v1::Grant& grant) {
  v1::LeaseRef ref;
  *ref.mutable_grant() = grant;
  return ref;
}

v1::LeaseRef lease_ref(const std::string& lease_id) {
  v1::LeaseRef ref;
  ref.set_lease_id(lease_id);
  return ref;
}

class LeaseKeeper::State {
 public:
  State(Client client, std::vector<v1::LeaseRef> leases, std::optional<Nanoseconds> ttl, OnOver on_over,
        CallOptions options)
      : client_(std::move(client)), ttl_(ttl), on_over_(std::move(on_over)), options_(std::move(options)) {
    options_.timeout.reset();
    for (auto& ref : leases) kept_.push_back({std::move(ref)});
    thread_ = std::thread([this] { run(); });
  }
  ~State() { stop(); }

  LeaseStatus status(std::size_t index) const {
    const std::lock_guard lock(mutex_);
    return kept_.at(index).status;
  }

  LeaseStatus wait_over(std::size_t index, Nanoseconds timeout) const {
    std::unique_lock lock(mutex_);
    const Kept& kept = kept_.at(index);
    over_.wait_for(lock, std::min<Nanoseconds>(timeout, std::chrono::hours(24 * 365)),
                   [&] { return kept.status.over || stopped_; });
    return kept.status;
  }

  std::optional<Error> interruption() const {
    const std::lock_guard lock(mutex_);
    return interruption_;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      if (stream_) stream_->cancel();
      woken_.notify_all();
      over_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  using Batch = std::vector<std::size_t>;

  void run() {
    while (!is_stopped()) {
      expire();
      const auto [batch, wake] = due_now();
      if (!wake) break;
      if (batch.empty()) {
        sleep_until(*wake);
        continue;
      }
      renew(batch);
    }
    close();
  }

  bool is_stopped() const {
    const std::lock_guard lock(mutex_);
    return stopped_;
  }

  void sleep_until(Clock::time_point until) {
    std::unique_lock lock(mutex_);
    woken_.wait_until(lock, until, [this] { return stopped_; });
  }

  // Ends the leases whose time is over, as far as this side knows.
  void expire() {
    const auto now = Clock::now();
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const Kept& kept = kept_[i];
      if (kept.status.over || !kept.left_until || now < *kept.left_until) continue;
      end(i, v1::LEASE_STATE_EXPIRED, v1::FAILURE_REASON_LEASE_EXPIRED);
    }
  }

  // Returns the leases to renew now, or when to look again; no time when no lease is left.
  std::pair<Batch, std::optional<Clock::time_point>> due_now() const {
    const auto now = Clock::now();
    std::optional<Clock::time_point> wake;
    Batch batch;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const Kept& kept = kept_[i];
      if (kept.status.over) continue;
      // While no stream may be opened yet, the end of a lease may come first.
      auto next = std::max(kept.due, not_before_);
      if (kept.left_until) next = std::min(next, *kept.left_until);
      wake = std::min(wake.value_or(next), next);
      if (kept.due <= now + kTogether && batch.size() < kBatch) batch.push_back(i);
    }
    if (wake && (*wake > now || not_before_ > now)) batch.clear();
    return {batch, wake};
  }

  void renew(const Batch& batch) {
    if (!stream_) open();
    v1::KeepAliveRequest request;
    for (const std::size_t i : batch) *request.add_leases() = kept_[i].ref;
    if (ttl_) *request.mutable_ttl() = to_duration(*ttl_);
    const auto sent = Clock::now();
    v1::KeepAliveResponse reply;
    const auto until = answer_until(sent);
    auto progress = stream_->write(request, until);
    if (progress == detail::Progress::kDone) progress = stream_->read(reply, until);
    if (progress != detail::Progress::kDone) return broken(progress);
    if (reply.leases_size() != request.leases_size()) return broken(detail::Progress::kTimeout);
    pause_ = {};
    {
      const std::lock_guard lock(mutex_);
      interruption_.reset();
    }
    for (std::size_t row = 0; row < batch.size(); ++row) take(batch[row], reply.leases(static_cast<int>(row)), sent);
  }

  // Returns how long to wait for the answer to a renewal that is sent now. The lease that ends first must have time for
  // another attempt, and its end must not be missed.
  Clock::time_point answer_until(Clock::time_point sent) const {
    std::optional<Clock::time_point> first;
    for (const Kept& kept : kept_) {
      if (!kept.status.over && kept.left_until) first = std::min(first.value_or(*kept.left_until), *kept.left_until);
    }
    if (!first) return sent + kAnswer;
    const auto limit = std::clamp<Nanoseconds>((*first - sent) / 2, kShortest, kAnswer);
    return std::min(sent + limit, std::max(*first, sent));
  }

  void take(std::size_t index, const v1::RenewedLease& row, Clock::time_point sent) {
    const bool refused = row.reason() != v1::FAILURE_REASON_UNSPECIFIED && row.state() != v1::LEASE_STATE_LIVE;
    if (refused || is_over(row.state())) return end(index, row.state(), row.reason());
    const auto left = from_duration(row.remaining());
    Kept& kept = kept_[index];
    kept.left_until = sent + left;
    kept.due = sent + std::max<Nanoseconds>(left / 3, kShortest);
    const std::lock_guard lock(mutex_);
    kept.status.state = row.state();
  }

  void end(std::size_t index, v1::LeaseState state, v1::FailureReason reason) {
    const LeaseStatus status{state, reason, true};
    {
      const std::lock_guard lock(mutex_);
      kept_[index].status = status;
      over_.notify_all();
    }
    if (on_over_) on_over_(index, status);
  }

  void open() {
    auto made = std::make_unique<KeepAliveStream>(
        [this](grpc::ClientContext& context, grpc::CompletionQueue& queue, void* tag) {
          client_.prepare(context, options_);
          return client_.stub<LeaseStub>()->AsyncKeepAlive(&context, &queue, tag);
        });
    const std::lock_guard lock(mutex_);
    stream_ = std::move(made);
    if (stopped_) stream_->cancel();
  }

  void broken(detail::Progress progress) {
    if (is_stopped()) return;
    grpc::Status status(grpc::StatusCode::UNAVAILABLE, "the renewals have no answer");
    if (progress == detail::Progress::kEnded && !stream_->status().ok()) status = stream_->status();
    const Error why(status, {"LeaseService/KeepAlive", client_.address(), ""});
    close();
    not_before_ = Clock::now() + pause_.next(why.retry_delay());
    {
      const std::lock_guard lock(mutex_);
      interruption_ = why;
    }
    if (!is_refusal(why)) return;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      if (!kept_[i].status.over) end(i, v1::LEASE_STATE_UNSPECIFIED, why.reason());
    }
  }

  void close() {
    std::unique_ptr<KeepAliveStream> ended;
    const std::lock_guard lock(mutex_);
    ended = std::move(stream_);
  }

  const Client client_;
  const std::optional<Nanoseconds> ttl_;
  const OnOver on_over_;
  CallOptions options_;

  // The mutex guards `status` of the leases and the fields that follow it. Only the keeper's thread uses all others.
  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  std::condition_variable woken_;
  std::unique_ptr<KeepAliveStream> stream_;
  std::optional<Error> interruption_;
  bool stopped_ = false;

  std::vector<Kept> kept_;
  detail::Pause pause_;
  Clock::time_point not_before_{};
  std::thread thread_;
};

LeaseKeeper::LeaseKeeper(Client client, std::vector<v1::LeaseRef> leases, std::optional<Nanoseconds> ttl,
                         OnOver on_over, CallOptions options)
    : state_(std::make_unique<State>(std::move(client), std::move(leases), ttl, std::move(on_over),
                                     std::move(options))) {}
LeaseKeeper::LeaseKeeper(LeaseKeeper&&) noexcept = default;
LeaseKeeper& LeaseKeeper::operator=(LeaseKeeper&&) noexcept = default;
LeaseKeeper::~LeaseKeeper() = default;

LeaseStatus LeaseKeeper::status(std::size_t index) const { return state_->status(index); }
LeaseStatus LeaseKeeper::wait_over(std::size_t index, Nanoseconds timeout) const {
  return state_->wait_over(index, timeout);
}
std::optional<Error> LeaseKeeper::interruption() const { return state_->interruption(); }
void LeaseKeeper::stop() { state_->stop(); }

}  // namespace kvgrpc
