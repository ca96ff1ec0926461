/*
 * A Collective's fields are written by its constructor, and afterwards by the queue's thread until
 * it has run; the mutex of c10d::Work guards what both sides use. The thread finishes the Work
 * before it signals the event, so that a host that has waited for a stream finds the Work complete.
 *
 * Memory is kept by tensors of our own over the same storages. Releasing the caller's on the
 * queue's thread could take the GIL, which is unavailable while Python ends. Releasing a storage
 * with a Python object could take it too (letGo).
 */
#include "collective.h"

#include <c10/core/StreamGuard.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "../torch/allocator.h"
#include "../torch/fork.h"
#include "../torch/gil.h"
#include "../torch/kernel_failures.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../task/tensor_accesses.h"
#include "../task/tensor_components.h"
#include "../task/tensor_metadata.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::ivalue::Future;

/* A tensor of our own over the same memory. */
at::Tensor sameMemory(const at::Tensor &tensor) {
  return tensorOf(c10::Storage(tensor.storage()), DispatchKey::PrivateUse1,
                  {tensor.sizes(), tensor.strides(), tensor.scalar_type()},
                  tensor.storage_offset());
}

/* True if this is the last reference except Python's own; PyTorch takes the GIL to release it. */
bool leavesItToPython(const at::Tensor &tensor) {
  if (!tensor.has_storage()) return true;  // each part of a sparse tensor may too
  const c10::Storage &storage = tensor.storage();
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr ||
         (storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj() != nullptr &&
          storage.use_count() <= 2);
}

at::Tensor flat(c10::Storage storage, DispatchKey key, c10::ScalarType dtype, size_t bytes,
                size_t offset) {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t count = static_cast<int64_t>(bytes) / size;
  return tensorOf(std::move(storage), key, {{count}, {1}, dtype},
                  static_cast<int64_t>(offset) / size);
}

at::Tensor bytesOf(const at::Tensor &tensor) {
  return flat(c10::Storage(tensor.storage()), DispatchKey::PrivateUse1, at::kByte, tensor.nbytes(),
              bytesBefore(tensor));
}

/* Gloo's text without the place in its source, its advice and a backtrace. */
std::string plain(std::string text) {
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(". This is typically caused by"));
  const size_t place = text.find(".cc:"), end = text.find("] ");
  if (text.rfind('[', 0) == 0 && place < end && end != std::string::npos) text.erase(0, end + 2);
  return text;
}

std::exception_ptr backendError(std::string text) {
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)));
}

/* For an exception that has no caller. */
void warnOf(const std::exception_ptr &exception) {
  if (!exception) return;
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception &error) {
    TORCH_WARN("a hook of a process group failed: ", error.what());
  }
}

void awaitScheduled(orEvent_t done, std::chrono::milliseconds timeout) {
  if (!isScheduled()) return;
  const auto start = std::chrono::steady_clock::now();
  while (orEventQuery(done) == orErrorNotReady &&
         (timeout == kNoTimeout || std::chrono::steady_clock::now() - start < timeout))
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace

/* Runs on the queue's thread. While Python ends the tensors are leaked. */
void letGo(std::vector<at::Tensor> &tensors) {
  for (at::Tensor &tensor : tensors) {
    int state = 0;
    if (!leavesItToPython(tensor)) {
      tensor.reset();
    } else if (takeGil(state)) {
      tensor.reset();
      giveGilBack(state);
    } else {
      (void)tensor.unsafeReleaseTensorImpl();
    }
  }
  tensors.clear();
}

Collective::Collective(std::shared_ptr<CollectiveQueues> queues, std::string group,
                       uint64_t sequence, c10::Device device, Call call, Issue issue)
    : Work(queues->rank(), call.type),
      queues_(std::move(queues)),
      group_(std::move(group)),
      sequence_(sequence),
      device_(device),
      call_(std::move(call)),
      inputs_(call_.in.size() + (call_.sends ? call_.out.size() : 0)),
      issue_(std::move(issue)),
      sparse_(std::move(call_.sparse)),
      reach_(canMap(device.index())),
      handOver_(std::make_shared<HandOver>(isScheduled() ? ownStream() : 0)),
      signalled_(device.index(), orEventExternal),
      progress_(c10::str(call_.name, " ", sequence_, " of group ", group_, " (",
                         queues_->peers().rank(queues_->rank()), " of ", queues_->size(), ") on ",
                         device_),
                signalled_.get()),
      outcome_(c10::make_intrusive<Future>(c10::IntType::get())) {
  if (!sparse_.empty()) future_ = futureOn(device_);
  // Also needed by a schedule without the sanitizer, because a tape counts what is queued.
  if (sanitizerActive() || handOver_->hasBeginning()) orderOwnStream();
  for (const auto *tensors : {&call_.in, &call_.out}) {
    for (const at::Tensor &tensor : *tensors) {
      memory_.push_back(sameMemory(tensor));
      handOver_->ranges.push_back(
          {{tensor.const_data_ptr(), tensor.nbytes()}, tensor.scalar_type()});
    }
  }
  if (sanitizerActive()) reportToSanitizer();
  handOver_->maps = reach_;
  handOver_->receives = reach_ && inputs_ < memory_.size();
  call_.in.clear();
  call_.out.clear();
  handOver_->queueOn(currentStreamHandle(device_.index()), call_.name, device_);
}

/* Called once it is in its queue: before, no thread would end it, and the schedule's task would
 * wait in vain. */
void Collective::letBegin() const {
  if (!handOver_->hasBeginning()) return;
  try {
    orderOwnStream();
    handOver_->queueBeginning(call_.name, device_);
  } catch (...) {
    handOver_->giveUpBeginning();
    throw;
  }
}

orStream_t Collective::ownStream() const {
  const auto use = CollectiveQueues::Use::own;
  return OpenRegStream(queues_->sideStream(use, device_.index(), call_.queue)).stream();
}

/* Orders later work on the collective's own stream after the work queued on the current one. */
void Collective::orderOwnStream() const {
  const OwnedEvent before(device_.index(), orEventDisableTiming);
  OPENREG_CHECK(orEventRecord(before.get(), currentStreamHandle(device_.index())));
  OPENREG_CHECK(orStreamWaitEvent(ownStream(), before.get()));
}

/* Reports that the collective does not run on the current stream: it is concurrent with later work
 * there until its event. */
void Collective::reportToSanitizer() const {
  const orStream_t handle = ownStream();
  OPENREG_CHECK(orSanitizerMarkExternal(handle));
  const c10::ArrayRef<at::Tensor> memory(memory_);
  reportTensors(call_.name, handle, memory.slice(inputs_), memory.slice(0, inputs_));
  OPENREG_CHECK(orSanitizerEventAfter(signalled_.get(), handle));
}

void Collective::joinDevice() const {
  const auto use = CollectiveQueues::Use::device;
  const OpenRegStream all(queues_->sideStream(use, device_.index()));
  OPENREG_CHECK(orStreamWaitEvent(all.stream(), done()));
}

// Copies on both sides are made in the queue's turn, because an input may be an earlier
// collective's output. The caller does not make them: OPENREG_LAUNCH_BLOCKING would make it wait
// for a peer.

void Collective::stageInputs() {
  const c10::StreamGuard side(queues_->sideStream(CollectiveQueues::Use::copies, device_.index()));
  for (const at::Tensor &tensor : memory_) {
    copies_.push_back(at::empty({static_cast<int64_t>(tensor.nbytes())},
                                at::TensorOptions(at::kByte).pinned_memory(true)));
    copies_.back().copy_(bytesOf(tensor));
  }
}

void Collective::copyBack() {
  const c10::StreamGuard side(queues_->sideStream(CollectiveQueues::Use::copies, device_.index()));
  for (size_t i = inputs_; i < memory_.size(); ++i) bytesOf(memory_[i]).copy_(copies_[i]);
}

/* Runs on a stream of our own without queued waits: wait() and the future report the readers to the
 * allocator. */
void Collective::replaceSparse(const at::Tensor &from) {
  const at::Tensor &to = sparse_.front();
  const Components old = componentsOf(to);
  std::vector<at::Tensor> before(old.begin(), old.end());
  Components parts = componentsOf(from);
  {
    const c10::StreamGuard side(
        queues_->sideStream(CollectiveQueues::Use::copies, device_.index()));
    for (at::Tensor &part : parts) part = part.to(device_);
  }
  reassemble(to, from, parts);
  letGo(before);
}

std::vector<at::Tensor> Collective::hostTensors() {
  std::vector<at::Tensor> host;
  for (size_t i = 0; i < handOver_->ranges.size(); ++i) {
    const HandOver::Range &range = handOver_->ranges[i];
    const auto dtype = call_.bytes ? at::kByte : c10::toRealValueType(range.dtype);
    c10::Storage storage =
        reach_ ? cpuStorage(range.kernel, range.memory.bytes) : c10::Storage(copies_[i].storage());
    host.push_back(flat(std::move(storage), DispatchKey::CPU, dtype, range.memory.bytes, 0));
  }
  return host;
}

/* NCCL multiplies each rank's floats by a factor of their dtype before it adds them, so that an
 * average of large float16 numbers is no inf. An input that is only read is multiplied in a
 * copy. */
void Collective::scale(std::vector<at::Tensor> &host) const {
  for (size_t i = 0; i < (inputs_ != 0 ? inputs_ : host.size()); ++i) {
    if (!at::isFloatingType(host[i].scalar_type())) continue;
    const at::Tensor factor = at::scalar_tensor(call_.factor, host[i].options());
    host[i] = inputs_ != 0 ? host[i].mul(factor) : host[i].mul_(factor);
  }
}

/* An average of integers is computed from their sum. */
void Collective::divide(std::vector<at::Tensor> &host) const {
  for (size_t i = inputs_; i < host.size(); ++i) {
    if (at::isIntegralType(host[i].scalar_type(), /*includeBool=*/true))
      host[i].div_(queues_->size(), "trunc");
  }
}

void Collective::run(c10d::Backend &gloo) {
  if (!handOver_->await()) {
    complete(cancelled(), false);
    call_.announcement.dropped = true;
    try {
      agree(gloo);
    } catch (const std::exception &) {  // the other ranks have it, and no caller waits here
    }
    return;
  }
  std::exception_ptr error;
  at::AutoDispatchBelowADInplaceOrView below;
  try {
    agree(gloo);
    if (!reach_) stageInputs();
    std::vector<at::Tensor> host = hostTensors();
    progress_.at(Progress::data);
    if (!handOver_->isSplit()) {
      exchange(gloo, host);
    } else if (!exchangeCopies(gloo, host)) {
      return complete(cancelled(), false);
    }
    if (!reach_) copyBack();
    if (!sparse_.empty()) replaceSparse(host.back());
  } catch (const std::exception &failed) {
    error = failure(failed.what(), call_.peers);
  }
  complete(std::move(error), true);
}

void Collective::exchange(c10d::Backend &gloo, std::vector<at::Tensor> &host) {
  if (call_.factor != 1) asKernel([&] { scale(host); });
  const GlooWork work = issue_(gloo, host);
  work->wait();
  if (call_.average) asKernel([&] { divide(host); });
  if (call_.type != c10d::OpType::RECVANYSOURCE) return;
  std::lock_guard<std::mutex> lock(mutex_);
  source_ = work->sourceRank();
}

/* Exchanges copies, for a split collective. It writes nothing to the device's memory before its
 * second half. If a reset has cancelled that, it never writes, because the memory may be another
 * tensor's by now. */
bool Collective::exchangeCopies(c10d::Backend &gloo, std::vector<at::Tensor> &host) {
  std::vector<at::Tensor> copies;
  asKernel([&] {
    for (const at::Tensor &tensor : host) copies.push_back(tensor.clone());
  });
  exchange(gloo, copies);
  if (!handOver_->awaitLanding()) return false;
  asKernel([&] {
    for (size_t i = inputs_; i < host.size(); ++i) host[i].copy_(copies[i]);
  });
  return true;
}

/* The error of a thread that ends while it waits for a rank names that rank. */
void Collective::agree(c10d::Backend &gloo) {
  if (isMessage()) return;
  const std::vector<int> all = call_.peers;
  const std::string text = disagreement(gloo, sequence_, call_.announcement, [&](int rank) {
    call_.peers = rank < 0 ? all : std::vector<int>{rank};
    if (rank >= 0) progress_.at(Progress::call, queues_->peers().place(rank));
  });
  if (text.empty()) return;
  call_.peers.clear();
  throw std::runtime_error(text);
}

std::exception_ptr Collective::cancelled() const {
  const char *before =
      handOver_->isSplit() ? "its second half was to run" : "the inputs were there";
  return failure(c10::str("its device was reset or failed before ", before).c_str(), {});
}

std::exception_ptr Collective::failure(const char *what, const std::vector<int> &peers) const {
  const std::string reason = plain(what);
  std::string text = c10::str(call_.name, " of group ", group_, " failed on ",
                              queues_->peers().rank(rank_), " of ", queues_->size(), ": ", reason);
  if (!peers.empty()) text += " (peer: " + queues_->peers().named(reason, peers) + ")";
  return backendError(std::move(text));
}

void Collective::complete(std::exception_ptr error, bool ofDevice) {
  issue_ = nullptr;
  progress_.over();
  std::vector<at::Tensor> memory = takeMemory();
  letGo(memory);
  copies_.clear();
  ofDevice = ofDevice && error != nullptr;
  if (ofDevice) warnOf(queues_->hooks()->failed.run());
  const auto result = error ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
  finish(error);
  reportCompletion();
  if (ofDevice) setFailure(call_.name, device_.index(), std::move(error));
  orEventSignal(signalled_.get(), ofDevice ? orErrorLaunchFailure : orSuccess);
  handOver_->finish();
  if (!sparse_.empty()) markFuture();
  outcome_->markCompleted(c10::IValue(static_cast<int64_t>(result)));
}

/* Called before a host that waits for the event goes on, which finds the hooks' work done. */
void Collective::reportCompletion() {
  std::vector<std::shared_ptr<Completion>> completions;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    completions.swap(completions_);
    if (exception_) return;
  }
  for (const auto &completion : completions) completion->arrive();
}

void Collective::reportTo(std::shared_ptr<Completion> completion) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!completed_) return completions_.push_back(std::move(completion));
    if (exception_) return;
  }
  completion->arrive();
}

void Collective::markFuture() {
  try {
    if (exception_) std::rethrow_exception(exception_);
    queues_->completeAfter(future_, device_, {done()}, sparse_);
  } catch (...) {
    future_->setErrorIfNeeded(std::current_exception());
  }
}

/* A program that has seen the end need not wait. It asks from Python; without the GIL it is the
 * flight recorder, which asks at each call. */
bool Collective::isCompleted() {
  const bool over = Work::isCompleted();
  if (over && holdsGil()) OPENREG_CHECK(orSanitizerEventOver(done()));
  return over;
}

/* The time at which its owner waits cannot be observed. It is assumed to come first. */
c10::intrusive_ptr<Future> Collective::getFutureResult() {
  OPENREG_CHECK(orSanitizerEventOver(done()));
  return outcome_;
}

int Collective::sourceRank() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return source_;
}

std::vector<at::Tensor> Collective::takeMemory() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(memory_, {});
}

void Collective::synchronize() {
  OPENREG_CHECK(orStreamWaitEvent(currentStreamHandle(device_.index()), done()));
  if (reach_) takeMemory();
}

bool Collective::wait(std::chrono::milliseconds timeout) {
  synchronize();
  // The queue's thread may handle it later, and a device that was reset has no error: no other call
  // would report it.
  if (handOver_->isCancelled()) std::rethrow_exception(cancelled());
  std::exception_ptr error;
  {
    WithoutGil unlocked;
    if (timeout != kNoTimeout || call_.blocks) awaitScheduled(done(), timeout);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto over = [this] { return completed_; };
    if (timeout != kNoTimeout) {
      if (!cv_.wait_for(lock, timeout, over)) {
        std::rethrow_exception(backendError(
            c10::str(call_.name, " of group ", group_, " on ", queues_->peers().rank(rank_),
                     " is not complete after the ", timeout.count(), " ms that wait() was given")));
      }
    } else if (call_.blocks) {
      cv_.wait(lock, over);
    }
    error = exception_;
  }
  if (timeout != kNoTimeout || call_.blocks) OPENREG_CHECK(orSanitizerEventOver(done()));
  if (!error) {
    for (const at::Tensor &tensor : sparse_) {
      for (const at::Tensor &part : componentsOf(tensor)) {
        recordStream(part.storage().data_ptr(), getCurrentOpenRegStream(device_.index()));
      }
    }
    return true;
  }
  // The error surfaces here, so the next call that synchronises need not report it again.
  const orError_t reported = orEventSynchronize(signalled_.get());
  if (reported == orErrorLaunchFailure) OPENREG_CHECK(reported);
  std::rethrow_exception(error);
}

}  // namespace torch_openreg
