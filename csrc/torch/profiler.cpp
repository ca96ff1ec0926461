/*
 * torch.profiler with ProfilerActivity.PrivateUse1: a Kineto plugin over the core's trace. PyTorch
 * asks the factory for a profiler at its first use, the profiler for a session at each profile, and
 * the session for its records at the end. A session owns its data; one thread at a time uses it,
 * except for push and pop.
 *
 * Push and pop run on the thread of an operator and report which operator and which record_function
 * range is innermost from there on. Both go into the thread's tag (orTraceTag), which the core adds
 * to launches. This is how a kernel finds the operator that launched it.
 */
#define USE_KINETO
#define FMT_HEADER_ONLY 1
#include <c10/util/ApproximateClock.h>
#include <c10/util/Exception.h>
#include <libkineto.h>
#include <openreg_package.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <openreg.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "check.h"

namespace torch_openreg {

namespace {

using Kind = libkineto::ActivityType;
using Activity = libkineto::GenericTraceActivity;
using Linked = libkineto::getLinkedActivityCallback;

// ---- The operator and the range that a thread is in.

uint64_t makeTag(uint32_t op, uint32_t range) { return static_cast<uint64_t>(range) << 32 | op; }
int32_t opOf(uint64_t tag) { return static_cast<int32_t>(tag); }
int32_t rangeOf(uint64_t tag) { return static_cast<int32_t>(tag >> 32); }

struct Nesting {
  uint64_t session = 0;
  std::vector<uint32_t> ops, ranges;

  void tag() const {
    orTraceTag(makeTag(ops.empty() ? 0 : ops.back(), ranges.empty() ? 0 : ranges.back()));
  }
};

/* A session may begin and end in the middle of an operator; it ignores other sessions' entries. */
Nesting &nestingIn(uint64_t session) {
  thread_local Nesting nesting;
  if (nesting.session != session) nesting = {session, {}, {}};
  return nesting;
}

void push(std::vector<uint32_t> &ids, uint64_t id) { ids.push_back(static_cast<uint32_t>(id)); }
void pop(std::vector<uint32_t> &ids) {
  if (!ids.empty()) ids.pop_back();
}

// ---- From the core's records to Kineto's activities.

Kind kindOf(orTraceKind kind) {
  if (kind == orTraceMemcpy) return Kind::GPU_MEMCPY;
  if (kind == orTraceMemset) return Kind::GPU_MEMSET;
  const bool runs = kind == orTraceKernel || kind == orTraceHostFunc;
  return runs ? Kind::CONCURRENT_KERNEL : Kind::PRIVATEUSE1_RUNTIME;
}

/* The trace's clock is CLOCK_MONOTONIC, Kineto's the time of day. */
int64_t timeOfDayOffset() {
  int64_t offset = 0, best = INT64_MAX;
  for (int i = 0; i < 16; ++i) {
    const int64_t before = c10::getTime(), monotonic = c10::getTime(true), after = c10::getTime();
    if (after - before >= best) continue;
    best = after - before;
    offset = before + best / 2 - monotonic;
  }
  return offset;
}

bool isDefaultStream(const orTraceRecord &record) {
  orStream_t standard = 0;
  return orStreamGetDefault(&standard, record.device) == orSuccess && standard == record.stream;
}

/* Otherwise the record is of a stream, even if a waiting host thread ran it. */
bool isOfHost(const orTraceRecord &record) {
  return record.kind == orTraceLaunch || record.kind == orTraceSynchronize || record.device < 0;
}

struct Pair {
  const orTraceRecord *launch = nullptr;
  const orTraceRecord *launched = nullptr;
  int32_t id = 0;
};

/* Unlike the ids that PyTorch gives its operators, which start at 1. */
constexpr int32_t kFirstId = 1 << 30;

class Converter {
 public:
  Converter(const orTrace &trace, const std::set<Kind> &kinds, libkineto::CpuTraceBuffer &out,
            const Linked &linked)
      : trace_(trace), kinds_(kinds), out_(out), linked_(linked) {}

  void convert() {
    matchUp();
    for (size_t i = 0; i < trace_.count; ++i) addRecord(*orTraceRecordAt(&trace_, i));
    for (const auto &[key, range] : ranges_) addRange(key, range);
  }

 private:
  using RangeKey = std::tuple<int32_t, int, int>;  // range, device, number of the stream
  using Span = std::pair<int64_t, int64_t>;

  void matchUp() {
    for (size_t i = 0; i < trace_.count; ++i) {
      const orTraceRecord &record = *orTraceRecordAt(&trace_, i);
      if (record.correlation == 0) continue;
      Pair &pair = pairs_[record.correlation];
      (record.kind == orTraceLaunch ? pair.launch : pair.launched) = &record;
      if (pair.id == 0) pair.id = kFirstId + static_cast<int32_t>(pairs_.size());
    }
  }

  Activity *add(Kind kind, const std::string &name, Span time, int64_t device, int64_t row) {
    if (kinds_.count(kind) == 0) return nullptr;
    out_.emplace_activity(out_.span, kind, name);
    Activity &activity = *out_.activities.back();
    activity.startTime = time.first;
    activity.endTime = time.second;
    activity.device = static_cast<int32_t>(device);
    activity.resource = static_cast<int32_t>(row);
    activity.threadId = static_cast<int32_t>(row);
    return &activity;
  }

  void addRecord(const orTraceRecord &record) {
    const auto found = pairs_.find(record.correlation);
    const Pair pair = found == pairs_.end() ? Pair{} : found->second;
    const bool onHost = isOfHost(record);
    const Span time{static_cast<int64_t>(record.start_ns) + offset_,
                    static_cast<int64_t>(record.end_ns) + offset_};
    Activity *activity =
        add(kindOf(record.kind), record.name, time, onHost ? libkineto::processId() : record.device,
            onHost ? record.thread : record.stream_number);
    if (activity == nullptr) return;
    describe(*activity, record, pair.id);
    const uint64_t tag = onHost ? record.tag : pair.launch != nullptr ? pair.launch->tag : 0;
    if (opOf(tag) != 0) activity->linked = linked_(opOf(tag));
    if (pair.launch != nullptr && pair.launched != nullptr) {
      activity->flow.id = static_cast<uint32_t>(pair.id);
      activity->flow.type = libkineto::kLinkAsyncCpuGpu;
      activity->flow.start = onHost;
    }
    if (!onHost && rangeOf(tag) != 0) extendRange(tag, record, time);
  }

  static void describe(Activity &activity, const orTraceRecord &record, int32_t correlation) {
    activity.id = correlation;
    if (record.device >= 0) activity.addMetadata("device", record.device);
    if (record.stream != 0) {
      activity.addMetadata("stream", record.stream_number);
      // torch.Stream.stream_id, as text: it has more digits than a JSON reader keeps of a number.
      const orStream_t id = isDefaultStream(record) ? 0 : record.stream;
      activity.addMetadataQuoted("stream_id", std::to_string(id));
    }
    if (correlation != 0) activity.addMetadata("correlation", correlation);
    if (record.lane >= 0) activity.addMetadata("lane", record.lane);
    if (record.bytes == 0) return;
    activity.addMetadata("bytes", record.bytes);
    const auto ns = std::max<uint64_t>(record.end_ns - record.start_ns, 1);
    activity.addMetadata("memory bandwidth (GB/s)",
                         static_cast<double>(record.bytes) / static_cast<double>(ns));
  }

  // ---- What a record_function range did on a stream, from the first kernel to the last.

  void extendRange(uint64_t tag, const orTraceRecord &record, Span time) {
    Span &range = ranges_.try_emplace({rangeOf(tag), record.device, record.stream_number}, time)
                      .first->second;
    range = {std::min(range.first, time.first), std::max(range.second, time.second)};
  }

  void addRange(const RangeKey &key, Span time) {
    const auto [id, device, stream] = key;
    const libkineto::ITraceActivity *range = linked_(id);
    if (range == nullptr) return;
    Activity *activity = add(Kind::GPU_USER_ANNOTATION, range->name(), time, device, stream);
    if (activity != nullptr) activity->linked = range;
  }

  const orTrace &trace_;
  const std::set<Kind> &kinds_;
  libkineto::CpuTraceBuffer &out_;
  const Linked &linked_;
  const int64_t offset_ = timeOfDayOffset();
  std::unordered_map<uint64_t, Pair> pairs_;
  std::map<RangeKey, Span> ranges_;
};

// ---- The rows: a process a device, a thread a stream.

libkineto::DeviceInfo deviceRow(int device) {
  const std::string name = orDevicesName() + (":" + std::to_string(device));
  return {device, libkineto::kExceedMaxPid + device, name, name};
}

libkineto::ResourceInfo streamRow(const orTraceRecord &record) {
  const bool isDefault = isDefaultStream(record);
  const std::string name = isDefault ? "default stream " : "stream ";
  return {record.stream_number, isDefault ? 0 : record.stream_number + 1, record.device,
          name + std::to_string(record.stream_number)};
}

/* Maps each stream to its first record. */
std::map<int, const orTraceRecord *> streamsOf(const orTrace &trace) {
  std::map<int, const orTraceRecord *> streams;
  for (size_t i = 0; i < trace.count; ++i) {
    const orTraceRecord &record = *orTraceRecordAt(&trace, i);
    if (!isOfHost(record)) streams.try_emplace(record.stream_number, &record);
  }
  return streams;
}

// ---- Sessions.

class Session final : public libkineto::IActivityProfilerSession {
 public:
  explicit Session(std::set<Kind> kinds) : kinds_(std::move(kinds)) {}
  ~Session() override {
    if (on_) stop();
    orTraceFree(&trace_);
  }

  void start() override {
    on_ = isOk(orTraceStart(0));
    status_ = on_ ? libkineto::TraceStatus::RECORDING : libkineto::TraceStatus::ERROR;
  }

  void stop() override {
    if (!std::exchange(on_, false) || !isOk(orTraceStop(&trace_))) return;
    status_ = libkineto::TraceStatus::PROCESSING;
    if (trace_.dropped == 0) return;
    complain("the trace has no room for " + std::to_string(trace_.dropped) + " of " +
             std::to_string(trace_.count + trace_.dropped) +
             " records of openreg devices: OPENREG_TRACE_RECORDS=" +
             std::to_string(trace_.capacity) + " can be raised");
  }

  std::vector<std::string> errors() override { return errors_; }
  void processTrace(libkineto::ActivityLogger &) override {}
  void processTrace(libkineto::ActivityLogger &logger, Linked linked, int64_t startTime,
                    int64_t) override {
    Converter(trace_, kinds_, *buffer_, linked).convert();
    for (const auto &activity : buffer_->activities) activity->log(logger);
    for (const auto &[number, record] : streamsOf(trace_)) {
      streams_.push_back(streamRow(*record));
      devices_.insert(record->device);
    }
    orTraceFree(&trace_);
    logger_ = &logger;
    startTime_ = startTime;
  }

  /* Kineto asks for one name although there may be several devices, and falls back to "GPU". */
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    std::unique_ptr<libkineto::DeviceInfo> last;
    for (const int device : devices_) {
      if (last != nullptr) logger_->handleDeviceInfo(*last, startTime_);
      last = std::make_unique<libkineto::DeviceInfo>(deviceRow(device));
    }
    return last;
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return streams_; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }

  void pushCorrelationId(uint64_t id) override {
    nest([id](Nesting &n) { push(n.ops, id); });
  }
  void popCorrelationId() override {
    nest([](Nesting &n) { pop(n.ops); });
  }
  void pushUserCorrelationId(uint64_t id) override {
    nest([id](Nesting &n) { push(n.ranges, id); });
  }
  void popUserCorrelationId() override {
    nest([](Nesting &n) { pop(n.ranges); });
  }

 private:
  template <typename F>
  void nest(const F &change) {
    Nesting &nesting = nestingIn(number_);
    change(nesting);
    nesting.tag();
  }

  void complain(const std::string &what) {
    errors_.push_back(what);
    TORCH_WARN(what);
  }

  bool isOk(orError_t error) {
    if (error == orSuccess) return true;
    complain(std::string("no profile of ") + orDevicesName() +
             " devices: " + orGetLastErrorMessage());
    orGetLastError();
    return false;
  }

  static uint64_t nextNumber() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  const std::set<Kind> kinds_;
  const uint64_t number_ = nextNumber();
  bool on_ = false;
  orTrace trace_ = sized<orTrace>();
  std::vector<std::string> errors_;
  std::set<int> devices_;
  std::vector<libkineto::ResourceInfo> streams_;
  libkineto::ActivityLogger *logger_ = nullptr;
  int64_t startTime_ = 0;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_ =
      std::make_unique<libkineto::CpuTraceBuffer>();
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string &name() const override {
    static const std::string name = orDevicesName();
    return name;
  }
  const std::set<Kind> &availableActivities() const override { return kinds_; }

  /* Null if none of the requested activities is ours. */
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<Kind> &asked, const libkineto::Config &) override {
    if (asked.count(Kind::CONCURRENT_KERNEL) == 0) return nullptr;
    return std::make_unique<Session>(asked);
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<Kind> &asked, const libkineto::Config &config) override {
    return configure(asked, config);
  }

 private:
  const std::set<Kind> kinds_{Kind::GPU_MEMCPY, Kind::GPU_MEMSET, Kind::CONCURRENT_KERNEL,
                              Kind::GPU_USER_ANNOTATION, Kind::PRIVATEUSE1_RUNTIME};
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

}  // namespace

}  // namespace torch_openreg
