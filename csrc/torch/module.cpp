/*
 * torch_openreg._C: what the Python package needs of the shim. It is thin: the C++ API checks
 * indices and writes the errors, and the Python functions that call these have the documentation.
 */
#include <openreg_package.h>
#include <openreg_schedule.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Stream.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "allocator.h"
#include "autograd.h"
#include "device.h"
#include "event.h"
#include "generator.h"
#include "gil.h"
#include "module.h"
#include "sanitizer.h"
#include "stream.h"
#include "sync_debug.h"
#include "warnings.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using StreamName = std::tuple<c10::StreamId, int>;  // stream id, device index

OpenRegStream streamNamed(const StreamName &name) {
  const auto &[id, index] = name;
  return OpenRegStream(c10::Stream(c10::Stream::UNSAFE, deviceAt(checkIndex(index)), id));
}

// ---- Errors -------------------------------------------------------------------------------------

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const c10::Error &) {
    torch::translate_exception_to_python(error);
  } catch (const torch::PyTorchError &) {
    torch::translate_exception_to_python(error);
  }
}

// ---- Devices ------------------------------------------------------------------------------------

orDeviceProperties deviceProperties(int64_t index) {
  auto properties = sized<orDeviceProperties>();
  OPENREG_CHECK(orGetDeviceProperties(&properties, checkIndex(index)));
  return properties;
}

bool canAccessPeer(int64_t index, int64_t peer) {
  int can = 0;
  OPENREG_CHECK(orDeviceCanAccessPeer(&can, checkIndex(index), checkIndex(peer)));
  return can != 0;
}

void synchronize(int64_t index) {
  DeviceSwitch device(checkIndex(index));
  if (notesSynchronization())
    warnOrThrowOnSynchronization(c10::str("torch.", orDevicesName(), ".synchronize"),
                                 currentStreamHandle(currentDevice()));
  WithoutGil unlocked;
  OPENREG_CHECK_SYNCHRONIZED(orDeviceSynchronize());
}

void reset(int64_t index) {
  const c10::DeviceIndex checked = checkIndex(index);
  DeviceSwitch device(checked);
  WithoutGil unlocked;
  OPENREG_CHECK(orDeviceReset());
  graphsAreReset(checked);
}

void bindDevices(py::module_ &m) {
  py::class_<orDeviceProperties>(m, "_DeviceProperties")
      .def_property_readonly("name",
                             [](const orDeviceProperties &p) { return std::string(p.name); })
      .def_property_readonly("factory",
                             [](const orDeviceProperties &p) { return std::string(p.factory); })
      .def_property_readonly("model",
                             [](const orDeviceProperties &p) { return std::string(p.model); })
      .def_readonly("major", &orDeviceProperties::major)
      .def_readonly("minor", &orDeviceProperties::minor)
      .def_readonly("total_memory", &orDeviceProperties::total_memory)
      .def_readonly("index", &orDeviceProperties::index)
      .def_readonly("numa_node", &orDeviceProperties::numa_node)
      .def_readonly("lanes", &orDeviceProperties::lanes)
      .def_readonly("host_cores", &orDeviceProperties::host_cores)
      .def_property_readonly("multi_processor_count",
                             [](const orDeviceProperties &p) { return p.host_cores; })
      .def_property_readonly("can_map", [](const orDeviceProperties &p) { return p.can_map != 0; })
      .def_property_readonly("is_integrated",
                             [](const orDeviceProperties &p) { return p.integrated != 0; })
      // A device's properties never change.
      .def("__eq__",
           [](const orDeviceProperties &a, const py::object &b) {
             return py::isinstance<orDeviceProperties>(b) &&
                    a.index == b.cast<const orDeviceProperties &>().index;
           })
      .def("__hash__", [](const orDeviceProperties &p) { return p.index; })
      .def("__repr__", [](const orDeviceProperties &p) {
        return std::string("_DeviceProperties(name='") + p.name + "', factory='" + p.factory +
               "', total_memory=" + std::to_string(p.total_memory >> 20) +
               "MB, lanes=" + std::to_string(p.lanes) +
               ", host_cores=" + std::to_string(p.host_cores) + ")";
      });
  m.def("_device_count", [] { return static_cast<int>(deviceCount()); });
  m.def("_checked_device_count", [] { return static_cast<int>(checkedDeviceCount()); });
  m.def("_check_index", [](int64_t index) { return static_cast<int>(checkIndex(index)); });
  m.def("_get_device", [] { return static_cast<int>(currentDevice()); });
  m.def("_exchange_device",
        [](int64_t index) { return static_cast<int>(exchangeDevice(checkIndex(index))); });
  m.def("_get_device_properties", &deviceProperties);
  m.def("_mem_get_info",
        [](int64_t index) { return deviceAllocator().getMemoryInfo(checkIndex(index)); });
  m.def("_can_access_peer", &canAccessPeer);
  m.def("_synchronize", &synchronize);
  m.def("_reset", &reset);
  m.def("_initialize", &initialize);
  m.def("_is_active", [](int64_t index) { return orDeviceIsActive(checkIndex(index)) != 0; });
  m.def("_stop_autograd_device_threads", &stopAutogradDeviceThreads);
  m.def("_in_forked_child", [] { return orInForkedChild() != 0; });
}

// ---- Streams and events -------------------------------------------------------------------------

void sleepOnCurrentStream(uint64_t nanoseconds) {
  OPENREG_CHECK(orLaunchSleep(getCurrentOpenRegStream().stream(), nanoseconds));
}

orEvent_t createExternalEvent(int64_t index) {
  return OwnedEvent(checkIndex(index), orEventExternal).release();
}

/* torch.Event takes a device and asks no backend about it, so it would accept any index. It also
 * ignores `interprocess`, for which this returns an event of the device module. */
newfunc makeTorchEvent = nullptr;

bool isForProcesses(PyTypeObject *type, PyObject *kwargs, py::handle event) {
  PyObject *given = kwargs != nullptr ? PyDict_GetItemString(kwargs, "interprocess") : nullptr;
  return given == Py_True && type == THPEventClass &&
         reinterpret_cast<THPEvent *>(event.ptr())->event.device_type() ==
             c10::DeviceType::PrivateUse1;
}

py::object eventForProcesses(PyObject *args, PyObject *kwargs) {
  const auto module = py::module_::import("torch_openreg.openreg");
  const auto rest = py::reinterpret_borrow<py::dict>(kwargs).attr("copy")();
  if (PyTuple_GET_SIZE(args) > 0) rest["device"] = py::handle(PyTuple_GET_ITEM(args, 0));
  return module.attr("Event")(**py::dict(rest));
}

PyObject *makeCheckedTorchEvent(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  HANDLE_TH_ERRORS
  auto event = py::reinterpret_steal<py::object>(makeTorchEvent(type, args, kwargs));
  if (!event) return nullptr;
  PyObject *device = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0)
                     : kwargs != nullptr        ? PyDict_GetItemString(kwargs, "device")
                                                : nullptr;
  if (device != nullptr && device != Py_None) {
    const auto given = py::module_::import("torch").attr("device")(py::handle(device));
    const c10::Device &parsed = reinterpret_cast<THPDevice *>(given.ptr())->device;
    if (parsed.is_privateuseone() && parsed.has_index()) checkIndex(parsed.index());
  }
  if (isForProcesses(type, kwargs, event)) event = eventForProcesses(args, kwargs);
  return event.release().ptr();
  END_HANDLE_TH_ERRORS
}

/* A static type, as torch.Stream below. */
void setEventFromHandle(py::object method) {
  py::handle(THPEventClass->tp_dict)["from_ipc_handle"] = std::move(method);
  PyType_Modified(THPEventClass);
}

/* torch.Event.elapsed_time does not accept an event of a subclass. */
double elapsedTime(py::handle start, py::handle end) {
  for (py::handle event : {start, end}) {
    TORCH_CHECK_TYPE(THPEvent_Check(event.ptr()), "expected a torch.Event, got ",
                     Py_TYPE(event.ptr())->tp_name);
  }
  return reinterpret_cast<THPEvent *>(start.ptr())
      ->event.elapsedTime(reinterpret_cast<THPEvent *>(end.ptr())->event);
}

void checkDevicesOfTorchEvents() {
  if (makeTorchEvent != nullptr) return;
  makeTorchEvent = THPEventClass->tp_new;
  THPEventClass->tp_new = makeCheckedTorchEvent;
}

/* Makes the stream, unless it is bad, and its device current; returns the previous ones. */
std::tuple<int, StreamName> enterStream(const StreamName &name) {
  const OpenRegStream stream = streamNamed(name);
  const OpenRegStream before = getCurrentOpenRegStream(stream.device_index());
  setCurrentOpenRegStream(stream);
  return {exchangeDevice(stream.device_index()), StreamName(before.id(), before.device_index())};
}

/* Restores the device first: the stream may be an external one that was destroyed meanwhile. */
void leaveStream(int device, const StreamName &before) {
  setDevice(static_cast<c10::DeviceIndex>(device));
  setCurrentOpenRegStream(streamNamed(before));
}

/* torch.Stream is a static type, which Python code cannot change. */
void setStreamContext(py::object enter, py::object exit) {
  py::handle methods(THPStreamClass->tp_dict);
  methods["__enter__"] = std::move(enter);
  methods["__exit__"] = std::move(exit);
  PyType_Modified(THPStreamClass);
}

void bindStreams(py::module_ &m) {
  checkDevicesOfTorchEvents();
  m.def("_set_event_from_handle", &setEventFromHandle);
  m.def("_set_stream_context", &setStreamContext);
  m.def("_enter_stream", &enterStream);
  m.def("_leave_stream", &leaveStream);
  m.def("_check_stream", [](const StreamName &name) { streamNamed(name).stream(); });
  m.def("_stream_priority", [](const StreamName &name) { return streamNamed(name).priority(); });
  m.def("_stream_priority_range", [] {
    const PriorityRange range = priorityRange();
    return std::tuple(range.least, range.greatest);
  });
  m.def("_stream_handle", [](const StreamName &name) { return streamNamed(name).stream(); });
  m.def("_stream_from_external", [](orStream_t handle, int64_t index) {
    return getStreamFromExternal(handle, checkIndex(index)).id();
  });
  m.def("_is_current_stream_capturing", &isCurrentStreamCapturing);
  m.def("_sleep", &sleepOnCurrentStream);
  m.def("_elapsed_time", &elapsedTime);
  m.def("_external_event_create", &createExternalEvent);
  m.def("_external_event_wait", [](orEvent_t event, const StreamName &name) {
    OPENREG_CHECK(orStreamWaitEvent(streamNamed(name).stream(), event));
  });
  m.def("_external_event_signal", [](orEvent_t event) {
    OPENREG_CHECK(orEventSignal(event, orSuccess));
    if (sanitizerActive()) raiseRaces();
  });
  m.def("_external_event_destroy", [](orEvent_t event) { OPENREG_CHECK(orEventDestroy(event)); });
}

// ---- Random numbers -----------------------------------------------------------------------------

void bindRandom(py::module_ &m) {
  m.def("_manual_seed_all", &manualSeedAll);
  m.def("_default_generator", [](int64_t index) {
    return py::reinterpret_steal<py::object>(
        THPGenerator_Wrap(getDefaultGenerator(checkIndex(index))));
  });
}

// ---- Diagnostics --------------------------------------------------------------------------------

void setSyncDebugMode(int64_t mode) {
  TORCH_CHECK(mode >= 0 && mode <= 2, "invalid value of debug_mode ", mode,
              ", expected one of 0, 1, 2");
  syncDebugMode.store(static_cast<SyncDebugMode>(mode), std::memory_order_relaxed);
}

std::vector<std::tuple<std::string, std::string, std::string, std::string>> settings() {
  std::vector<std::tuple<std::string, std::string, std::string, std::string>> all;
  auto setting = sized<orSetting>();
  for (int i = 0; orGetSetting(i, &setting) == orSuccess; i++)
    all.emplace_back(setting.name, setting.value ? setting.value : "", setting.origin,
                     setting.description);
  orGetLastError();
  return all;
}

std::vector<std::string> deviceNames(const char *type) {
  std::vector<std::string> names;
  orDevice *device = nullptr;
  for (int i = 0; orGetDeviceByIndex(&device, type, i) == orSuccess; i++) {
    auto attributes = sized<orDeviceAttributes>();
    OPENREG_CHECK(orDeviceGetAttributes(device, &attributes));
    names.emplace_back(attributes.name);
  }
  return names;
}

py::list factories() {
  checkedDeviceCount();  // so that the list shows which one serves
  py::list all;
  auto info = sized<orFactoryInfo>();
  for (int i = 0; orGetFactoryInfo(i, &info) == orSuccess; i++) {
    py::dict entry;
    entry["type"] = std::string(info.type);
    entry["name"] = std::string(info.name);
    entry["priority"] = info.priority;
    entry["serves"] = info.serves != 0;
    entry["plugin"] = std::string(info.plugin);
    entry["devices"] = info.serves != 0 ? deviceNames(info.type) : std::vector<std::string>();
    all.append(entry);
  }
  orGetLastError();
  return all;
}

void addDevices(const std::map<std::string, int> &deviceCount, const std::string &namePrefix) {
  std::vector<orDeviceCount> counts;
  for (const auto &[type, count] : deviceCount) counts.push_back({type.c_str(), count});
  const orDeviceConfig config{sizeof(orDeviceConfig), counts.data(), counts.size()};
  WithoutGil unlocked;
  OPENREG_CHECK(orAddDevices(&config, namePrefix.c_str()));
}

py::dict workerInfo() {
  auto info = sized<orWorkerInfo>();
  OPENREG_CHECK(orGetWorkerInfo(&info));
  py::dict entry;
  entry["limit"] = info.limit;
  entry["started"] = info.started;
  entry["queued"] = info.queued;
  return entry;
}

void setSchedule(int policy, uint64_t seed, bool atOnce) {
  WithoutGil unlocked;
  const auto set = atOnce ? &orScheduleSwitch : &orScheduleSet;
  OPENREG_CHECK(set(static_cast<orSchedulePolicy>(policy), seed));
}

std::tuple<int, uint64_t> schedule() {
  orSchedulePolicy policy{};
  uint64_t seed = 0;
  OPENREG_CHECK(orScheduleGet(&policy, &seed));
  return {policy, seed};
}

void setScheduleTape(const std::string &tape) {
  WithoutGil unlocked;
  OPENREG_CHECK(orScheduleSetTape(tape.c_str()));
}

/* (kind, flags, stream, a, b) of each step. */
py::list scheduleSteps() {
  py::list list;
  std::vector<orScheduleStep> steps(1024);
  size_t first = 0, count = steps.size();
  for (; count == steps.size(); first += count) {
    OPENREG_CHECK(
        orScheduleSteps(first, steps.data(), sizeof(orScheduleStep), steps.size(), &count));
    for (size_t i = 0; i < count; ++i) {
      const orScheduleStep &step = steps[i];
      list.append(py::make_tuple(step.kind, step.flags, step.stream, step.a, step.b));
    }
  }
  return list;
}

void bindDiagnostics(py::module_ &m) {
  const int version = orGetVersion();
  m.attr("_core_version") = c10::str(version / 10000, ".", version / 100 % 100, ".", version % 100);
  m.attr("_abi_version") = OPENREG_ABI_VERSION;
  m.def("_settings", &settings);
  m.def("_factories", &factories);
  m.def("_add_devices", &addDevices);
  m.def("_worker_info", &workerInfo);
  m.def("_schedule_set", &setSchedule);
  m.def("_schedule_get", &schedule);
  m.def("_schedule_set_tape", &setScheduleTape);
  m.def("_schedule_record", [](bool record) { OPENREG_CHECK(orScheduleRecord(record)); });
  m.def("_schedule_steps", &scheduleSteps);
  m.def("_poison", [](bool poison) { return orCachePoison(poison) != 0; });
  m.def("_set_sync_debug_mode", &setSyncDebugMode);
  m.def("_get_sync_debug_mode",
        [] { return static_cast<int>(syncDebugMode.load(std::memory_order_relaxed)); });
}

std::vector<Binder> &binders() {
  static std::vector<Binder> all;
  return all;
}

}  // namespace

bool addBinder(Binder binder) {
  binders().push_back(binder);
  return true;
}

}  // namespace torch_openreg

PYBIND11_MODULE(_C, m) {
  using namespace torch_openreg;
  registerHooks();
  startAutogradWithoutDevices();
  py::register_local_exception_translator(&translate);
  bindDevices(m);
  bindStreams(m);
  bindRandom(m);
  bindDiagnostics(m);
  for (const auto bind : binders()) bind(m);
}
