/*
 * Records which functions of the core a test enters, for mutate.py: one byte a function's address,
 * in a file that is mapped shared, so that forked children and processes that die count too.
 *
 * Linked into a core that is compiled with -finstrument-functions. CALLS_FILE names the file.
 */
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CALLS_BYTES = 1 << 22 };

extern const char calls_base __asm__("__ehdr_start") __attribute__((visibility("hidden")));
void __cyg_profile_func_enter(void *function, void *caller);
void __cyg_profile_func_exit(void *function, void *caller);

static char nothing[CALLS_BYTES];
static char *calls = nothing;

__attribute__((constructor(101))) static void mapCalls(void) {
  const char *path = getenv("CALLS_FILE");
  int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (file < 0 || ftruncate(file, CALLS_BYTES)) return;
  void *mapped = mmap(NULL, CALLS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) calls = mapped;
  close(file);
}

void __cyg_profile_func_enter(void *function, void *caller) {
  (void)caller;
  uintptr_t at = (uintptr_t)function - (uintptr_t)&calls_base;
  if (at < CALLS_BYTES) calls[at] = 1;
}

void __cyg_profile_func_exit(void *function, void *caller) { (void)function, (void)caller; }
