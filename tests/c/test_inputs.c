/*
 * The kept inputs of the fuzzer of text and bytes (inputs/program.c), each read once.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness.h"

/* pluginPath returns the same buffer each time. */
static void readCorpus(void) {
  char *program = strdup(pluginPath("inputs"));
  execl(program, "inputs", pluginPath("corpus"), NULL);
}

TEST(inputs_that_are_kept) { readCorpus(); }

TEST(inputs_that_are_kept_for_devices) {
  setenv("OPENREG_INPUTS_WITH_DEVICES", "1", 1);
  /* What streams hold at exit hangs on mappings that the leak checker does not search. */
  setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
  readCorpus();
}
