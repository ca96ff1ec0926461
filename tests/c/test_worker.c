/*
 * Workers: their number and their hook. What they run next is in test_scheduler.c.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"

TEST(worker_none_before_the_first_task) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  void *p;
  ASSERT_OK(orMalloc(&p, 4096));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_EQ(countThreads("openreg-"), 0);
  ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(countThreads("openreg-"), 1);
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(worker_limit_holds_over_devices_and_streams) {
  atomic_int ran = 0;
  orStream_t streams[32];
  for (int i = 0; i < 32; i++) streams[i] = newStreamOn(i % 2);
  for (int round = 0; round < 20; round++)
    for (int i = 0; i < 32; i++) {
      ASSERT_OK(orLaunchSleep(streams[i], 100000));
      launch(streams[i], countKernel, &ran);
    }
  ASSERT_LE(countThreads("openreg-"), laneLimit());
  for (int i = 0; i < 32; i++) ASSERT_OK(orStreamSynchronize(streams[i]));
  ASSERT_EQ(ran, 640);
  ASSERT_LE(laneLimit(), LANE_MOST);
  ASSERT_LE(countThreads("openreg-"), laneLimit());
  orWorkerInfo info = {.size = sizeof info};
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_OK(orGetWorkerInfo(&info));
  while (countThreads("openreg-") != info.started) sleepMs(1); /* a new one has no name yet */
  ASSERT_OK(orGetDeviceProperties(&properties, 0));
  ASSERT_EQ(properties.lanes, info.limit);
}

TEST(worker_tasks_run_at_once_up_to_the_limit) {
  Holder h[LANE_MOST] = {0};
  holdAllLanes(h); /* returns only if all of them run at the same time */
  ASSERT_EQ(countThreads("openreg-"), laneLimit());
  letGoAllLanes(h);
  ASSERT_OK(orDeviceSynchronize());
}

/* ---- the hook ---- */

static atomic_int hooked[LANE_MOST], wide_lanes;
static _Thread_local int my_lane = -1;

static void laneHook(int lane, int wide) {
  atomic_fetch_add(&hooked[lane], 1);
  if (wide) atomic_fetch_add(&wide_lanes, 1);
  my_lane = lane;
}

static orError_t checkHooked(void *args) {
  ASSERT_GE(my_lane, 0);
  return countKernel(args);
}

TEST(worker_hook_runs_once_on_each) {
  Holder h[LANE_MOST] = {0};
  atomic_int ran = 0;
  ASSERT_OK(orSetWorkerHook(laneHook));
  holdAllLanes(h);
  letGoAllLanes(h);
  for (int i = 0; i < 50; i++) launch(newStream(), checkHooked, &ran);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(ran, 50);
  for (int i = 0; i < laneLimit(); i++) ASSERT_EQ(hooked[i], 1);
  ASSERT_EQ(wide_lanes, 1);
  ASSERT_REFUSED(orSetWorkerHook(laneHook), orErrorAlreadyInitialized, "already");
}

static orError_t refusals[3];
static orStream_t stream_of_hook;

static void waitInHook(int lane, int wide) {
  void *address;
  (void)lane, (void)wide;
  refusals[0] = orStreamSynchronize(stream_of_hook);
  refusals[1] = orLaunchSleep(stream_of_hook, 1);
  refusals[2] = orMapForKernel(&address, refusals, 1);
}

/* It would wait for what this lane alone may run. */
TEST(worker_hook_may_not_wait) {
  ASSERT_OK(orSetWorkerHook(waitInHook));
  stream_of_hook = newStream();
  ASSERT_OK(orLaunchSleep(stream_of_hook, 1));
  ASSERT_OK(orStreamSynchronize(stream_of_hook));
  for (int i = 0; i < 3; i++) ASSERT_ERROR(refusals[i], orErrorNotPermitted);
}

TEST(worker_info_counts_what_is_queued) {
  orStream_t s = newStream();
  orWorkerInfo info = {.size = sizeof info};
  orEvent_t gate = closeGate(s);
  atomic_int ran = 0;
  for (int i = 0; i < 10; i++) launch(s, countKernel, &ran);
  ASSERT_OK(orGetWorkerInfo(&info));
  ASSERT_EQ(info.queued, 11);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orGetWorkerInfo(&info));
  ASSERT_EQ(info.queued, 0);
  ASSERT_ERROR(orGetWorkerInfo(NULL), orErrorInvalidValue);
}
