/*
 * What a device factory may have beyond memory, copies and compute: kernels for operators, errors
 * with a text, times of the hardware, properties, and calls when the device is lost, is reset, and
 * when the process exits.
 */
#include <string.h>
#include <time.h>

#include "gate.h"
#include "openreg_operator.h"
#include "stub_factory.h"

static atomic_int lost, resets, drops;
static _Atomic orEvent_t started; /* the event of the kernel that runs */
static _Atomic orStream_t ran_on;
static _Atomic(const orOperatorCall *) seen;
static int self[2];

static orError_t makeSelf(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; i++) devices[i].self = &self[i];
  return orSuccess;
}
static orError_t runNow(void *device, const orOperatorCall *call, orEvent_t done) {
  (void)done;
  atomic_store(&ran_on, device == &self[1] ? orGetTaskStream() : 0);
  atomic_store(&seen, call);
  return call->arguments[0].value.integer ? orErrorLaunchFailure : orSuccess;
}
static orError_t runLater(void *device, const orOperatorCall *call, orEvent_t done) {
  (void)device, (void)call;
  atomic_store(&started, done);
  return orErrorNotReady;
}
static int acceptsZero(void *device, const orOperatorCall *call) {
  return device == &self[1] && call->arguments[0].value.integer == 0;
}
static orError_t nameIt(void *device, orDeviceProperties *p) {
  snprintf(p->model, sizeof p->model, "model %d", (int)((int *)device - self));
  snprintf(p->name, sizeof p->name, "not the factory's to change");
  p->major = 7;
  p->minor = 5;
  return orSuccess;
}
static void noteLoss(void *device) { lost += device == &self[1]; }
/* Ends what runs, as a driver does. */
static orError_t noteReset(void *device) {
  resets += device == &self[1];
  if (started) orEventSignal(started, orSuccess);
  return orSuccess;
}
static void sayGoodbye(void *device) {
  fprintf(stderr, "shutdown of %d\n", (int)((int *)device - self));
}

static const orOperatorKernel table[] = {{"now", acceptsZero, runNow, NULL},
                                         {"later", NULL, runLater, NULL}};
static orDeviceFactory factory = STUB_FACTORY("seam", makeSelf);

static orStream_t useSeam(void) {
  orStream_t stream;
  factory.operators = table;
  factory.operator_count = 2;
  factory.properties = nameIt;
  factory.lost = noteLoss;
  factory.reset = noteReset;
  factory.shutdown = sayGoodbye;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &factory));
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orStreamCreate(&stream));
  return stream;
}

static void countDrop(void *owner) { ++*(atomic_int *)owner; }

static const orArgument zero = {.kind = orArgumentInt};
static const orArgument one = {.kind = orArgumentInt, .value.integer = 1};

static orOperatorCall callOf(int kernel, orStream_t stream, const orArgument *argument) {
  return (orOperatorCall){
      .kernel = &table[kernel], .stream = stream, .argument_count = 1, .arguments = argument};
}

static orEvent_t awaitStart(void) {
  while (!started) sched_yield();
  return started;
}

TEST(seam_operator_runs_in_its_stream) {
  orStream_t stream = useSeam();
  orOperatorCall call = callOf(0, stream, &zero), other = callOf(0, stream, &one);
  int accepts = 0, queued = 0;
  ASSERT_OK(orAcceptsOperator(&accepts, &call));
  ASSERT_EQ(accepts, 1);
  ASSERT_OK(orAcceptsOperator(&accepts, &other));
  ASSERT_EQ(accepts, 0);
  ASSERT_OK(orLaunchOperator(&call, NULL, &drops, countDrop, &queued));
  ASSERT_EQ(queued, 1);
  ASSERT_OK(orStreamSynchronize(stream));
  ASSERT_EQ(ran_on, stream);
  ASSERT_PTR(seen, &call);
  ASSERT_EQ(orGetTaskStream(), 0);
  ASSERT_OK(orLaunchOperator(&other, "called", &drops, countDrop, NULL));
  ASSERT_REFUSED(orStreamSynchronize(stream), orErrorLaunchFailure, "called on openreg:1");
  awaitInt(&drops, 2);
}

/* The arguments live until the event is signalled, and its text and times arrive. */
TEST(seam_operator_completes_later) {
  orStream_t stream = useSeam();
  orOperatorCall call = callOf(1, stream, &zero);
  orTrace trace = {.size = sizeof trace};
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orLaunchOperator(&call, NULL, &drops, countDrop, NULL));
  orEvent_t done = awaitStart();
  ASSERT_ERROR(orStreamQuery(stream), orErrorNotReady);
  ASSERT_EQ(drops, 0);
  ASSERT_REFUSED(orEventSetTimes(done, 20, 10), orErrorInvalidValue, "20 to 10");
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  uint64_t start = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
  ASSERT_OK(orEventSetTimes(done, start, start + 3000));
  ASSERT_OK(orEventSignalError(done, orErrorCopyFailure, "lane 3 is stuck"));
  ASSERT_REFUSED(orStreamSynchronize(stream), orErrorCopyFailure, "lane 3 is stuck");
  awaitInt(&drops, 1);
  ASSERT_OK(orTraceStop(&trace));
  int found = 0;
  for (size_t i = 0; i < trace.count; i++) {
    const orTraceRecord *r = orTraceRecordAt(&trace, i);
    if (r->kind != orTraceKernel) continue;
    ASSERT_STR(r->name, "later");
    ASSERT_EQ(r->start_ns, start);
    ASSERT_EQ(r->end_ns, start + 3000);
    found++;
  }
  ASSERT_EQ(found, 1);
  orTraceFree(&trace);
}

/* Drivers ignore what the signal returns, so the first mistake is printed. */
TEST(seam_completion_is_signalled_once) {
  orStream_t stream = useSeam();
  orOperatorCall call = callOf(1, stream, &zero);
  ASSERT_OK(orLaunchOperator(&call, NULL, &drops, countDrop, NULL));
  orEvent_t done = awaitStart();
  beginCapture();
  ASSERT_OK(orEventSignal(done, (orError_t)999));
  ASSERT_REFUSED(orStreamSynchronize(stream), orErrorLaunchFailure, "999, which is no orError_t");
  awaitInt(&drops, 1);
  ASSERT_REFUSED(orEventSignal(done, orSuccess), orErrorInvalidResourceHandle,
                 "device factory \"seam\" signalled later on openreg:1, which is over");
  ASSERT_ERROR(orEventSignal(done, orSuccess), orErrorInvalidResourceHandle);
  const char *text = endCapture();
  ASSERT_EQ(countLines(text), 1);
  ASSERT_CONTAINS(unwrapped(text), "openreg: device factory \"seam\" signalled later on openreg:1");
}

TEST(seam_external_event_has_a_text) {
  orEvent_t event;
  useSeam();
  ASSERT_OK(orEventCreateWithFlags(&event, orEventExternal));
  ASSERT_OK(orEventSignalError(event, orErrorLaunchFailure, "the link went down"));
  ASSERT_REFUSED(orEventSetTimes(event, 1, 2), orErrorInvalidValue, "signalled already");
  ASSERT_REFUSED(orEventSynchronize(event), orErrorLaunchFailure, "the link went down");
}

TEST(seam_only_the_devices_own_kernels) {
  orStream_t stream = useSeam();
  const orOperatorKernel foreign = {"now", NULL, runNow, NULL};
  orOperatorCall call = callOf(0, stream, &zero);
  int accepts, queued = 1;
  call.kernel = &foreign;
  ASSERT_REFUSED(orAcceptsOperator(&accepts, &call), orErrorInvalidValue, "one of the 2");
  ASSERT_REFUSED(orLaunchOperator(&call, NULL, NULL, NULL, &queued), orErrorInvalidValue,
                 "\"seam\"");
  ASSERT_EQ(queued, 0);
  const orOperatorKernel *kernels;
  size_t count;
  ASSERT_OK(orGetOperatorKernels(&kernels, &count));
  ASSERT_PTR(kernels, table);
  ASSERT_EQ(count, 2);
}

TEST(seam_incomplete_tables_are_refused) {
  static const orOperatorKernel nameless = {NULL, NULL, runNow, NULL}, idle = {"idle", 0, 0, 0};
  orDeviceFactory f = STUB_FACTORY("seam", makeSelf);
  f.operator_count = 1;
  ASSERT_REFUSED(orRegisterDeviceFactory("openreg", 9, &f), orErrorInvalidValue, "null pointer");
  f.operators = &nameless;
  ASSERT_REFUSED(orRegisterDeviceFactory("openreg", 9, &f), orErrorInvalidValue, "a name");
  f.operators = &idle;
  ASSERT_REFUSED(orRegisterDeviceFactory("openreg", 9, &f), orErrorInvalidValue, "must have run");
}

TEST(seam_properties) {
  orDeviceProperties p = {.size = sizeof p};
  useSeam();
  ASSERT_OK(orGetDeviceProperties(&p, 1));
  ASSERT_STR(p.model, "model 1");
  ASSERT_STR(p.name, "/openreg:1");
  ASSERT_EQ(p.major * 10 + p.minor, 75);
}

/* A reset ends what the hardware runs, so that its wait is over. */
TEST(seam_loss_and_reset) {
  orStream_t stream = useSeam();
  orOperatorCall call = callOf(1, stream, &zero);
  ASSERT_OK(orLaunchOperator(&call, NULL, NULL, NULL, NULL));
  awaitStart();
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(resets, 1);
  ASSERT_EQ(lost, 0);
  atomic_store(&started, 0);
  ASSERT_OK(orLaunchOperator(&call, NULL, NULL, NULL, NULL));
  ASSERT_OK(orEventSignalError(awaitStart(), orErrorDeviceLost, "fell off the bus"));
  ASSERT_REFUSED(orStreamSynchronize(stream), orErrorDeviceLost, "fell off the bus");
  awaitInt(&lost, 1);
  atomic_store(&started, 0);
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(resets, 2);
  ASSERT_EQ(lost, 1);
}

HELPER(seam_leave) { useSeam(); }

TEST(seam_shutdown_at_exit) {
  char text[TEST_MAX_TEXT];
  ASSERT_EQ(runHelper("seam_leave", text, sizeof text), 0);
  ASSERT_STR(text, "shutdown of 1\n"); /* the device that was used */
}
