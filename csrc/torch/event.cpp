#include "event.h"

namespace torch_openreg {

unsigned eventFlags(c10::EventFlag flag) {
  if (flag == c10::EventFlag::PYTORCH_DEFAULT) return orEventDisableTiming;
  TORCH_CHECK(flag == c10::EventFlag::BACKEND_DEFAULT, deviceName(),
              " events take the flag PYTORCH_DEFAULT or BACKEND_DEFAULT, got ",
              static_cast<int>(flag));
  return orEventDefault;
}

bool queryEvent(orEvent_t event) {
  const orError_t error = orEventQuery(event);
  if (error == orErrorNotReady) return false;
  OPENREG_CHECK(error);
  return true;
}

}  // namespace torch_openreg
