/*
 * Lanes: how many, which stream runs next, the hook.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"

enum { LANE_MOST = 8 };

static int limit(void) {
  orLaneInfo info;
  ASSERT_OK(orGetLaneInfo(&info));
  return info.limit;
}

/* Threads of this process whose name begins with `prefix`. */
static int countThreads(const char *prefix) {
  int n = 0;
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *d; (d = readdir(tasks));) {
    char path[300], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", d->d_name);
    FILE *f = d->d_name[0] == '.' ? NULL : fopen(path, "r");
    if (!f) continue;
    if (fgets(name, sizeof name, f) && !strncmp(name, prefix, strlen(prefix))) n++;
    fclose(f);
  }
  closedir(tasks);
  return n;
}

/* Every lane runs a holder. */
static void holdAllLanes(Holder *holders) {
  for (int i = 0; i < limit(); i++) hold(newStreamOn(i % 2), &holders[i]);
}

/* A kernel that notes its place in the order of all such kernels. */
static atomic_int places;
static orError_t placeKernel(void *args) {
  **(int **)args = atomic_fetch_add(&places, 1) + 1;
  return orSuccess;
}

TEST(lane_none_before_the_first_task) {
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

TEST(lane_limit_holds_over_devices_and_streams) {
  atomic_int ran = 0;
  orStream_t streams[32];
  for (int i = 0; i < 32; i++) streams[i] = newStreamOn(i % 2);
  for (int round = 0; round < 20; round++)
    for (int i = 0; i < 32; i++) {
      ASSERT_OK(orLaunchSleep(streams[i], 100000));
      launch(streams[i], countKernel, &ran);
    }
  ASSERT_LE(countThreads("openreg-"), limit());
  for (int i = 0; i < 32; i++) ASSERT_OK(orStreamSynchronize(streams[i]));
  ASSERT_EQ(ran, 640);
  ASSERT_LE(limit(), LANE_MOST);
  ASSERT_LE(countThreads("openreg-"), limit());
  orLaneInfo info;
  orDeviceProperties properties;
  ASSERT_OK(orGetLaneInfo(&info));
  while (countThreads("openreg-") != info.started) sleepMs(1); /* a new one has no name yet */
  ASSERT_OK(orGetDeviceProperties(&properties, 0));
  ASSERT_EQ(properties.lanes, info.limit);
}

TEST(lane_tasks_run_at_once_up_to_the_limit) {
  Holder h[LANE_MOST] = {0};
  holdAllLanes(h); /* returns only if all of them run at the same time */
  ASSERT_EQ(countThreads("openreg-"), limit());
  for (int i = 0; i < limit(); i++) letGo(&h[i]);
  ASSERT_OK(orDeviceSynchronize());
}

TEST(lane_64_gated_streams_do_not_stop_another) {
  orEvent_t gate = newGate();
  orStream_t gated[64];
  atomic_int ran = 0, other = 0;
  for (int i = 0; i < 64; i++) {
    gated[i] = newStreamOn(i % 2);
    ASSERT_OK(orStreamWaitEvent(gated[i], gate));
    launch(gated[i], countKernel, &ran);
  }
  orStream_t s = newStream();
  for (int i = 0; i < 100; i++) launch(s, countKernel, &other);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(other, 100);
  ASSERT_EQ(ran, 0);
  openGate(gate);
  for (int i = 0; i < 64; i++) ASSERT_OK(orStreamSynchronize(gated[i]));
  ASSERT_EQ(ran, 64);
}

TEST(lane_urgent_streams_come_first) {
  Holder h[LANE_MOST] = {0};
  int place[4];
  orStream_t streams[4];
  holdAllLanes(h);
  for (int p = 0; p < 4; p++) { /* the least urgent is queued first */
    streams[p] = newStreamOfPriority(-p);
    launch(streams[p], placeKernel, &place[p]);
  }
  letGo(&h[0]);
  for (int p = 0; p < 4; p++) ASSERT_OK(orStreamSynchronize(streams[p]));
  for (int p = 0; p < 4; p++) ASSERT_EQ(place[p], 4 - p);
  for (int i = 1; i < limit(); i++) letGo(&h[i]);
  ASSERT_OK(orDeviceSynchronize());
}

TEST(lane_equal_streams_take_turns_in_order) {
  Holder h[LANE_MOST] = {0};
  int place[8];
  orStream_t streams[8];
  holdAllLanes(h);
  for (int i = 0; i < 8; i++) {
    streams[i] = newStreamOn(i % 2);
    launch(streams[i], placeKernel, &place[i]);
  }
  letGo(&h[0]);
  for (int i = 0; i < 8; i++) ASSERT_OK(orStreamSynchronize(streams[i]));
  for (int i = 0; i < 8; i++) ASSERT_EQ(place[i], i + 1);
  for (int i = 1; i < limit(); i++) letGo(&h[i]);
  ASSERT_OK(orDeviceSynchronize());
}

/* A stream in the middle of its tasks makes way after the one that is running. */
static void assertMakesWay(orStream_t busy, orStream_t other) {
  Holder h[LANE_MOST] = {0}, middle = {0};
  int late = 0, inner[50], last = 0;
  holdAllLanes(h);
  letGo(&h[0]); /* one lane serves `busy` */
  hold(busy, &middle);
  for (int i = 0; i < 50; i++) launch(busy, placeKernel, &inner[i]);
  launch(other, placeKernel, &late);
  launch(other, placeKernel, &last);
  sleepMs(3); /* longer than a stream of equal priority has to wait */
  letGo(&middle);
  ASSERT_OK(orStreamSynchronize(other));
  ASSERT_OK(orStreamSynchronize(busy));
  ASSERT_EQ(late, 1);
  ASSERT_EQ(last, 2);
  for (int i = 0; i < 50; i++) ASSERT_EQ(inner[i], i + 3);
  for (int i = 1; i < limit(); i++) letGo(&h[i]);
}

TEST(lane_makes_way_for_a_more_urgent_stream) {
  assertMakesWay(newStream(), newStreamOfPriority(-1));
}

TEST(lane_makes_way_for_one_that_has_waited) { assertMakesWay(newStream(), newStream()); }

TEST(lane_does_not_make_way_for_a_less_urgent_stream) {
  Holder h[LANE_MOST] = {0}, middle = {0};
  orStream_t busy = newStreamOfPriority(-2), other = newStreamOfPriority(-1);
  int late = 0, inner[50];
  holdAllLanes(h);
  letGo(&h[0]);
  hold(busy, &middle);
  for (int i = 0; i < 50; i++) launch(busy, placeKernel, &inner[i]);
  launch(other, placeKernel, &late);
  sleepMs(3);
  letGo(&middle);
  ASSERT_OK(orStreamSynchronize(other));
  ASSERT_OK(orStreamSynchronize(busy));
  ASSERT_EQ(late, 51);
  for (int i = 1; i < limit(); i++) letGo(&h[i]);
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

TEST(lane_hook_runs_once_on_each) {
  Holder h[LANE_MOST] = {0};
  atomic_int ran = 0;
  ASSERT_OK(orSetLaneHook(laneHook));
  holdAllLanes(h);
  for (int i = 0; i < limit(); i++) letGo(&h[i]);
  for (int i = 0; i < 50; i++) launch(newStream(), checkHooked, &ran);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(ran, 50);
  for (int i = 0; i < limit(); i++) ASSERT_EQ(hooked[i], 1);
  ASSERT_EQ(wide_lanes, 1);
  ASSERT_REFUSED(orSetLaneHook(laneHook), orErrorAlreadyInitialized, "already");
}

TEST(lane_info_counts_what_is_queued) {
  orStream_t s = newStream();
  orLaneInfo info;
  orEvent_t gate = closeGate(s);
  atomic_int ran = 0;
  for (int i = 0; i < 10; i++) launch(s, countKernel, &ran);
  ASSERT_OK(orGetLaneInfo(&info));
  ASSERT_EQ(info.queued, 11);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orGetLaneInfo(&info));
  ASSERT_EQ(info.queued, 0);
  ASSERT_ERROR(orGetLaneInfo(NULL), orErrorInvalidValue);
}
