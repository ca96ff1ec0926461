/*
 * The device under CUDA's name.
 *
 * PyTorch keeps the name of this kind of device in one string, which cannot be set twice and never
 * to "cuda". All of PyTorch reads it through c10::get_privateuse1_backend: code that parses a
 * device's name calls that before it consults its own table, and code that writes one calls it too.
 * In this process the libraries' references to that function are exchanged. They are data: the
 * entry of each library's table through which it calls a function of another library, or one of its
 * own that another may replace. From then on the name is "cuda" in every argument, string, file and
 * TorchScript program, at no cost for a call. The device's own name stays readable, because the
 * constructor that reads names is exchanged too.
 *
 * Called under the GIL, once.
 */
#include <ATen/core/GraphImplInterface.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <openreg_package.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "autograd.h"
#include "cuda_registrations.h"
#include "module.h"

namespace torch_openreg {

namespace {

using ReadDevice = void (*)(c10::Device *self, const std::string &text);
using NameOf = std::string (*)(bool lowerCase);

constexpr std::string_view kTheirs = "cuda";
constexpr const char *kNameOf = "_ZN3c1023get_privateuse1_backendB5cxx11Eb";
constexpr const char *kReadDevice =
    "_ZN3c106DeviceC1ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";

ReadDevice readDevice = nullptr;

std::string cudasName(bool lowerCase) { return lowerCase ? "cuda" : "CUDA"; }

/* A constructor's first argument is the object. */
void readEitherName(c10::Device *self, const std::string &text) {
  const std::string_view name = orDevicesName();
  const bool own =
      text.starts_with(name) && (text.size() == name.size() || text[name.size()] == ':');
  readDevice(self, own ? std::string(kTheirs) + text.substr(name.size()) : text);
}

// ---- A library's references ---------------------------------------------------------------------

#if defined(__x86_64__)
constexpr auto kJump = R_X86_64_JUMP_SLOT, kData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr auto kJump = R_AARCH64_JUMP_SLOT, kData = R_AARCH64_GLOB_DAT;
#else
constexpr unsigned kJump = ~0U, kData = ~0U;  // as_cuda() then finds that nothing was exchanged
#endif

struct Exchange {
  const char *name;
  void *replacement;
};

/* The dynamic section of a library, which the linker itself uses. */
class Library {
 public:
  explicit Library(const dl_phdr_info *info) : base_(info->dlpi_addr) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
      const ElfW(Phdr) &part = info->dlpi_phdr[i];
      if (part.p_type == PT_DYNAMIC)
        readDynamic(reinterpret_cast<const ElfW(Dyn) *>(base_ + part.p_vaddr));
      if (part.p_type == PT_GNU_RELRO) protected_ = &part;
    }
  }

  void exchange(const Exchange &what) const {
    if (symbols_ == nullptr || names_ == nullptr) return;
    exchangeIn(jumps_, jumpBytes_, what);
    // Relocations that name no symbol come first among the others.
    exchangeIn(others_ + nameless_, otherBytes_ - nameless_ * sizeof(ElfW(Rela)), what);
  }

 private:
  void readDynamic(const ElfW(Dyn) * entry) {
    for (; entry->d_tag != DT_NULL; entry++) {
      // glibc has made them addresses, except in the vDSO, which is not writable.
      const auto address =
          entry->d_un.d_ptr < base_ ? base_ + entry->d_un.d_ptr : entry->d_un.d_ptr;
      const auto *table = reinterpret_cast<const ElfW(Rela) *>(address);
      const auto tag = entry->d_tag;
      if (tag == DT_SYMTAB) symbols_ = reinterpret_cast<const ElfW(Sym) *>(address);
      if (tag == DT_STRTAB) names_ = reinterpret_cast<const char *>(address);
      if (tag == DT_JMPREL) jumps_ = table;
      if (tag == DT_PLTRELSZ) jumpBytes_ = entry->d_un.d_val;
      if (tag == DT_RELA) others_ = table;
      if (tag == DT_RELASZ) otherBytes_ = entry->d_un.d_val;
      if (tag == DT_RELACOUNT) nameless_ = entry->d_un.d_val;
    }
  }

  void exchangeIn(const ElfW(Rela) * relocation, size_t bytes, const Exchange &what) const {
    if (relocation == nullptr) return;
    for (const auto *end = relocation + bytes / sizeof(*relocation); relocation < end;
         relocation++) {
      const auto type = ELF64_R_TYPE(relocation->r_info);
      if (type != kJump && type != kData) continue;
      const ElfW(Sym) &symbol = symbols_[ELF64_R_SYM(relocation->r_info)];
      if (std::strcmp(names_ + symbol.st_name, what.name) != 0) continue;
      write(base_ + relocation->r_offset, what.replacement);
    }
  }

  /* A table that the linker filled at the start may have been protected since then. */
  void write(uintptr_t place, void *value) const {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void *start = reinterpret_cast<void *>(place & ~(page - 1));
    const bool locked = protected_ != nullptr && place - base_ >= protected_->p_vaddr &&
                        place - base_ < protected_->p_vaddr + protected_->p_memsz;
    if (locked && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return;
    __atomic_store_n(reinterpret_cast<void **>(place), value, __ATOMIC_RELEASE);
    if (locked) mprotect(start, page, PROT_READ);
  }

  uintptr_t base_;
  const ElfW(Phdr) *protected_ = nullptr;
  const ElfW(Sym) *symbols_ = nullptr;
  const char *names_ = nullptr;
  const ElfW(Rela) *jumps_ = nullptr, *others_ = nullptr;
  size_t jumpBytes_ = 0, otherBytes_ = 0, nameless_ = 0;
};

/* Exchanges in the libraries whose file name contains `library`. */
void exchangeIn(const char *library, Exchange what) {
  const auto context = std::make_pair(library, what);
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *data) {
        const auto &[part, exchange] =
            *static_cast<const std::pair<const char *, Exchange> *>(data);
        if (std::strstr(info->dlpi_name, part) != nullptr) Library(info).exchange(exchange);
        return 0;
      },
      const_cast<void *>(static_cast<const void *>(&context)));
}

void exchangeEverywhere(const Exchange &what) { exchangeIn("", what); }

void *definitionOf(const char *name) {
  Dl_info where{};
  dladdr(reinterpret_cast<void *>(&c10::GetAllocator), &where);
  void *library = where.dli_fname ? dlopen(where.dli_fname, RTLD_NOLOAD | RTLD_LAZY) : nullptr;
  void *found = library ? dlsym(library, name) : nullptr;
  if (library != nullptr) dlclose(library);
  return found;
}

/* Whether the exchanged functions are called, also by code inside c10 that reads names. */
bool isCuda() {
  const c10::Device device(c10::DeviceType::PrivateUse1, 1);
  return c10::Device("cuda:1") == device && device.str() == "cuda:1" &&
         c10::Device(orDevicesName() + std::string(":1")) == device;
}

/* PyTorch finds the factory of graphs by the device's name. In a PyTorch for CUDA, "CUDA" has
 * one. */
void makeGraphs() {
  const auto create = [](const at::GraphImplArgs &args) {
    return at::GraphImplRegistry()->Create("OPENREG", args);
  };
  at::GraphImplRegistry()->Register("CUDA", create, c10::REGISTRY_PREFERRED);
}

// ---- Autocast's switches ------------------------------------------------------------------------

c10::DeviceType ours(c10::DeviceType type) {
  return type == c10::DeviceType::CUDA ? c10::DeviceType::PrivateUse1 : type;
}

/* One of autocast's functions, for this device where it would be for CUDA. */
template <auto function, typename... Rest>
auto forOurs(c10::DeviceType type, Rest... rest) {
  return function(ours(type), rest...);
}

/* Python functions that name no device (torch.is_autocast_enabled(),
 * torch.get_autocast_gpu_dtype()) pass CUDA's to these. TorchScript's own, in another library, do
 * not reach them: it crashes in a scripted function that asks while the switch is on. */
void takeAutocastSwitches() {
  const Exchange switches[] = {
      {"_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE",
       reinterpret_cast<void *>(&forOurs<&at::autocast::is_autocast_enabled>)},
      {"_ZN2at8autocast20set_autocast_enabledEN3c1010DeviceTypeEb",
       reinterpret_cast<void *>(&forOurs<&at::autocast::set_autocast_enabled, bool>)},
      {"_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE",
       reinterpret_cast<void *>(&forOurs<&at::autocast::get_autocast_dtype>)},
      {"_ZN2at8autocast18set_autocast_dtypeEN3c1010DeviceTypeENS1_10ScalarTypeE",
       reinterpret_cast<void *>(&forOurs<&at::autocast::set_autocast_dtype, c10::ScalarType>)},
  };
  for (const Exchange &what : switches) exchangeIn("libtorch_python.", what);
}

bool takeCudasName() {
  if (readDevice != nullptr) return true;
  void *nameOf = definitionOf(kNameOf), *read = definitionOf(kReadDevice);
  if (nameOf == nullptr || read == nullptr) return false;
  readDevice = reinterpret_cast<ReadDevice>(read);
  exchangeEverywhere({kNameOf, reinterpret_cast<void *>(static_cast<NameOf>(&cudasName))});
  exchangeEverywhere({kReadDevice, reinterpret_cast<void *>(&readEitherName)});
  if (isCuda()) {
    makeGraphs();
    takeAutocastSwitches();
    exchangeIn("libtorch_cpu.", {kRegisterImpl, replacementOfRegisterImpl()});
    return true;
  }
  exchangeEverywhere({kNameOf, nameOf});
  exchangeEverywhere({kReadDevice, read});
  readDevice = nullptr;
  return false;
}

// ---- An attribute and a method of tensors -------------------------------------------------------

PyObject *isOurs(PyObject *self, void *) {
  return PyBool_FromLong(THPVariable_Unpack(self).is_privateuseone());
}

/* Tensor.is_cuda: a property in Python would take ten times as long. */
pybind11::object isCudaDescriptor() {
  static PyGetSetDef definition{"is_cuda", &isOurs, nullptr,
                                "Is True if the Tensor is stored on the GPU, False otherwise.",
                                nullptr};
  return pybind11::reinterpret_steal<pybind11::object>(
      PyDescr_NewGetSet(reinterpret_cast<PyTypeObject *>(THPVariableClass), &definition));
}

/* Tensor.cuda(device=None, non_blocking=False, memory_format=torch.preserve_format), by `to`. In
 * C++ so that reports and warnings name the program's line, not ours. */
PyObject *toCuda(PyObject *self, PyObject *args, PyObject *kwargs) {
  HANDLE_TH_ERRORS
  static const char *names[] = {"device", "non_blocking", "memory_format", nullptr};
  PyObject *device = Py_None, *nonBlocking = Py_False, *format = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO$O:cuda", const_cast<char **>(names), &device,
                                   &nonBlocking, &format)) {
    return nullptr;
  }
  namespace py = pybind11;
  static const py::handle index =
      py::object(py::module_::import("torch_openreg.openreg._utils").attr("device_index"))
          .release();
  const py::object at = index(py::handle(device));
  const c10::Device place(c10::DeviceType::PrivateUse1,
                          static_cast<c10::DeviceIndex>(py::cast<int>(at)));
  py::dict options;
  options["device"] = py::reinterpret_steal<py::object>(THPDevice_New(place));
  options["non_blocking"] = py::reinterpret_borrow<py::object>(nonBlocking);
  if (format != nullptr) options["memory_format"] = py::reinterpret_borrow<py::object>(format);
  return py::handle(self).attr("to")(**options).release().ptr();
  END_HANDLE_TH_ERRORS
}

pybind11::object cudaDescriptor() {
  static PyMethodDef definition{
      "cuda", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&toCuda)),
      METH_VARARGS | METH_KEYWORDS, nullptr};
  return pybind11::reinterpret_steal<pybind11::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject *>(THPVariableClass), &definition));
}

void bind(pybind11::module_ &m) {
  m.def("_may_have_gpu", &mayHaveGpu);
  m.def("_take_cudas_name", &takeCudasName);
  m.def("_is_cuda_descriptor", &isCudaDescriptor);
  m.def("_cuda_descriptor", &cudaDescriptor);
}

[[maybe_unused]] const bool bound = addBinder(&bind);

}  // namespace

}  // namespace torch_openreg
