#include "progress.h"

#include <openreg_watchdog.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_openreg {

namespace {

/* Threads of collectives continue while the process ends. */
struct UnderWay {
  std::mutex mutex;
  std::vector<const Progress *> all;  // in the order of their calls
};
UnderWay &underWay() { return leaked<UnderWay>(); }

void tell(orHangSay say, void *report) {
  std::vector<std::string> lines;
  {
    const std::lock_guard<std::mutex> lock(underWay().mutex);
    for (const Progress *progress : underWay().all) lines.push_back(progress->line());
  }
  for (const std::string &line : lines) say(report, line.c_str());
}

[[maybe_unused]] const bool hooked = (orSetHangHook(&tell), true);

}  // namespace

Progress::Progress(std::string name, orEvent_t event) : name_(std::move(name)), event_(event) {
  const std::lock_guard<std::mutex> lock(underWay().mutex);
  underWay().all.push_back(this);
}

void Progress::over() {
  const std::lock_guard<std::mutex> lock(underWay().mutex);
  auto &all = underWay().all;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
}

void Progress::at(Stage stage, std::string peer) {
  const std::lock_guard<std::mutex> lock(underWay().mutex);
  stage_ = stage;
  peer_ = std::move(peer);
}

/* Requires the lock. */
std::string Progress::line() const {
  const std::chrono::duration<double> age = std::chrono::steady_clock::now() - called_;
  char text[96];
  std::snprintf(text, sizeof(text), ": event 0x%llx, called %.1f s ago, ",
                static_cast<unsigned long long>(event_), age.count());
  switch (stage_) {
    case inputs:
      return name_ + text + "has not begun: waits for its inputs or for a collective before it";
    case call:
      return name_ + text + "waits for " + peer_ + " to call it";
    default:
      return name_ + text + "moves data";
  }
}

}  // namespace torch_openreg
