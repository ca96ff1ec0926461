/*
 * The sanitizer: a query's answer does not depend on how fast the device is.
 */
#include <pthread.h>

#include "sanitizer_helpers.h"

/* Work on the stream that is over, which the host has not been told. */
static char *doneOn(orStream_t stream) {
  char *a = deviceMemory(KIB);
  writes(stream, "aten::mul_", a, KIB);
  return a;
}

static void unready(orError_t answer) { ASSERT_EQ(answer, orErrorNotReady); }

TEST(sanitizer_answers_a_first_query_of_a_stream_not_ready) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *a = doneOn(side);
  unready(orStreamQuery(side));
  ASSERT_EQ(writes(s0, "whatever the answer", a, KIB), 1);
  ASSERT_OK(orStreamQuery(side));
  ASSERT_EQ(writes(s0, "after the answer", a, KIB), 0);
  a = doneOn(side);
  unready(orStreamQuery(side)); /* something new is there */
  ASSERT_OK(orStreamQuery(side));
}

TEST(sanitizer_answers_a_first_query_of_a_record_not_ready) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *a = doneOn(side);
  orEvent_t event = record(side);
  unready(orEventQuery(event));
  ASSERT_EQ(writes(s0, "whatever the answer", a, KIB), 1);
  ASSERT_OK(orEventQuery(event));
  ASSERT_OK(orEventQuery(event));
  ASSERT_EQ(writes(s0, "after the answer", a, KIB), 0);
  waitStream(side, s0);
  ASSERT_OK(orEventRecord(event, side)); /* the wait is new */
  unready(orEventQuery(event));
  ASSERT_OK(orEventQuery(event));
}

/* A loop ends that records or queues anew each turn. */
TEST(sanitizer_answers_the_truth_after_ten_queries) {
  orStream_t side = newStream();
  orEvent_t event = record(side);
  sanitize();
  for (int round = 0; round < 2; round++)
    for (int turn = 0; turn <= 10; turn++) {
      doneOn(side);
      ASSERT_OK(orEventRecord(event, side));
      ASSERT_EQ(orEventQuery(event), turn < 10 ? orErrorNotReady : orSuccess);
    }
  for (int turn = 0; turn <= 10; turn++) {
    doneOn(side);
    ASSERT_EQ(orStreamQuery(side), turn < 10 ? orErrorNotReady : orSuccess);
  }
}

TEST(sanitizer_answers_the_truth_where_the_caller_is_ordered) {
  orStream_t s0 = defaultOf(0), side = newStream();
  doneOn(side);
  ASSERT_OK(orStreamSynchronize(side));
  sanitize();
  ASSERT_OK(orStreamQuery(side)); /* nothing is queued */
  ASSERT_OK(orEventQuery(record(side)));
  doneOn(side);
  waitStream(s0, side);
  ASSERT_OK(orStreamSynchronize(s0));
  ASSERT_OK(orEventQuery(record(side)));
  ASSERT_OK(orEventQuery(record(s0)));
  ASSERT_OK(orStreamQuery(s0));
  ASSERT_OK(orStreamQuery(side));
  doneOn(side);
  orSanitizerIgnore(1);
  ASSERT_OK(orStreamQuery(side));
  orSanitizerIgnore(0);
  ASSERT_OK(orSanitizerDisable());
  ASSERT_OK(orEventQuery(record(side)));
}

static void *queries(void *event) {
  orSanitizerThreadBegins(event);
  unready(orEventQuery(*(orEvent_t *)event));
  ASSERT_OK(orEventQuery(*(orEvent_t *)event));
  orSanitizerThreadEnds();
  return NULL;
}

TEST(sanitizer_answers_each_thread_not_ready_once) {
  orStream_t side = newStream();
  pthread_t thread;
  sanitize();
  doneOn(side);
  orEvent_t event = record(side);
  orSanitizerThreadStarts(&event);
  unready(orEventQuery(event));
  ASSERT_OK(orEventQuery(event));
  ASSERT_EQ(pthread_create(&thread, NULL, queries, &event), 0);
  ASSERT_EQ(pthread_join(thread, NULL), 0);
}
