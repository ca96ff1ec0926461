/*
 * The times of a step that DDP keeps for its logger: events on the device's current stream. Without
 * a timer for the device, DDP warns in every program.
 */
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>
#include <optional>

#include "../torch/event.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"

namespace torch_openreg {

namespace {

class ReducerTimer final : public c10d::Timer {
 public:
  explicit ReducerTimer(c10::Device device) : device_(device.index()) {}

  void record(Event event) override {
    // The logger also needs the host's time.
    Timer::record(event);
    std::optional<OwnedEvent> &mark = marks_.at(static_cast<size_t>(event));
    if (!mark) mark.emplace(device_, orEventDefault);
    OPENREG_CHECK(orEventRecord(mark->get(), currentStreamHandle(device_)));
  }

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto &from = marks_.at(static_cast<size_t>(start));
    const auto &to = marks_.at(static_cast<size_t>(end));
    const OwnWait own;
    // A statistic must not block the host.
    if (!from || !to || !queryEvent(from->get()) || !queryEvent(to->get())) return std::nullopt;
    float milliseconds = 0;
    OPENREG_CHECK(orEventElapsedTime(&milliseconds, from->get(), to->get()));
    // The records of two steps may be mixed; then there is no result.
    if (milliseconds < 0) return std::nullopt;
    return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  }

 private:
  const c10::DeviceIndex device_;
  std::array<std::optional<OwnedEvent>, 5> marks_;  // by Event
};

}  // namespace

}  // namespace torch_openreg

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, torch_openreg::ReducerTimer)

}  // namespace c10d
