/*
 * Pinned memory that is mapped twice, and the guards of its pages.
 *
 *     block   the caller's   pages of a memfd: read and write, or guarded
 *     alias   the tasks'     the same pages: read and write, always
 *
 * A copy therefore needs no system call before or after it, though the host may not touch what it
 * reads or writes. Only the sanitizer uses this (page_guard.c): such memory is shared memory of the
 * system, which is slower to allocate than private memory.
 *
 * Forks. A shared mapping would let the child write its parent's memory. The parent therefore
 * copies each block before a fork, and the child puts the copy in the block's place. The child has
 * no aliases (MADV_DONTFORK).
 *
 * `lock` guards everything but `wanted` and the counts, which are written under it and read as
 * hints. It is a leaf, and held across a fork. Guards change under it, so that no page of an
 * unmapped block is touched.
 */
#include "device/pinned_alias.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/interval_tree.h"

typedef struct orAlias {
  orTreeNode node;    /* the block, in whole pages; first, so that its address is the orAlias's */
  ptrdiff_t distance; /* from the block to the alias */
  uint8_t *guards;    /* an orGuard for each page, then as many for `choose`; null: never guarded */
  size_t guarded;     /* guarded pages ... */
  orPages where;      /* ... which are all in this range */
  void *copy;         /* during a fork: the child's copy; or null */
} orAlias;

static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static orTree tree = OR_TREE_INITIALIZER;
static _Atomic size_t guarded_count; /* blocks */
static atomic_bool is_wanted;
_Atomic size_t orAliasCount;

static orAlias *find(const void *ptr) {
  return (orAlias *)orTreeFind(&tree, (uintptr_t)ptr, (uintptr_t)ptr + 1);
}

static size_t sizeOf(const orAlias *m) { return m->node.end - m->node.begin; }
static size_t pagesOf(const orAlias *m) { return sizeOf(m) / orPageSize(); }
static void *blockOf(const orAlias *m) { return (void *)m->node.begin; }
static char *aliasOf(const orAlias *m) { return (char *)m->node.begin + m->distance; }

/* ---- forks ---- */

/* Bytes that other threads write meanwhile are copied at some moment, as fork() copies all memory:
 * a benign race, hidden from ThreadSanitizer. Whole pages. */
__attribute__((no_sanitize_thread)) static void copyAsItIs(void *to, const void *from,
                                                           size_t size) {
  volatile uint64_t *words = to;
  const volatile uint64_t *now = from;
  for (size_t i = 0; i < size / sizeof *words; i++) words[i] = now[i];
}

static void copyForChild(orTreeNode *node) {
  orAlias *m = (orAlias *)node;
  void *copy = mmap(NULL, sizeOf(m), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  m->copy = copy == MAP_FAILED ? NULL : copy;
  if (m->copy) copyAsItIs(m->copy, aliasOf(m), sizeOf(m));
}

static void forgetCopy(orTreeNode *node) {
  orAlias *m = (orAlias *)node;
  if (m->copy) orUnmap(m->copy, sizeOf(m));
  m->copy = NULL;
}

/* If memory for the copy is short, the child has no such block. */
static void takeCopy(orTreeNode *node) {
  orAlias *m = (orAlias *)node;
  int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
  if (!m->copy || mremap(m->copy, sizeOf(m), sizeOf(m), flags, blockOf(m)) == MAP_FAILED)
    munmap(blockOf(m), sizeOf(m));
  m->copy = NULL;
}

static void beforeFork(void) {
  orMutexLock(&lock);
  orTreeEach(&tree, 0, UINTPTR_MAX, copyForChild);
}

static void inParent(void) {
  orTreeEach(&tree, 0, UINTPTR_MAX, forgetCopy);
  orMutexUnlock(&lock);
}

/* The child's own memory from now on. */
static void inChild(void) {
  orTreeEach(&tree, 0, UINTPTR_MAX, takeCopy);
  tree.root = NULL;
  atomic_store_explicit(&orAliasCount, 0, memory_order_relaxed);
  orMutexUnlock(&lock);
}

/* Installed before all other handlers, so that it runs last before a fork: others wait for tasks,
 * which may ask for an alias. */
__attribute__((constructor)) static void watchForks(void) {
  int error = pthread_atfork(beforeFork, inParent, inChild);
  if (error) orWarn("pthread_atfork failed (error %d): children share pinned memory", error);
}

/* ---- blocks ---- */

/* Returns the alias. The memfd's pages replace what is mapped at `ptr`, which a system that refuses
 * may already have unmapped. A core file has the block's bytes, and not the alias's again. */
static void *mapTwice(void *ptr, size_t size) {
  int fd = orMemoryFile("openreg pinned", size);
  if (fd < 0) return NULL;
  void *alias = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  bool ok = alias != MAP_FAILED && !madvise(alias, size, MADV_DONTFORK) &&
            mmap(ptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == ptr;
  close(fd);
  if (ok) (void)madvise(alias, size, MADV_DONTDUMP);
  if (ok) return alias;
  if (alias == MAP_FAILED) return NULL;
  orUnmap(alias, size);
  (void)!mmap(ptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return NULL;
}

void orAliasMake(void *ptr, size_t bytes) {
  uintptr_t begin = (uintptr_t)ptr, end = begin + orWholePages(bytes);
  orAlias *m = calloc(1, sizeof *m);
  orMutexLock(&lock);
  void *alias = m && !orTreeFind(&tree, begin, end) ? mapTwice(ptr, end - begin) : NULL;
  if (alias) {
    m->distance = (char *)alias - (char *)ptr;
    orTreeInsert(&tree, &m->node, begin, end);
    atomic_fetch_add_explicit(&orAliasCount, 1, memory_order_relaxed);
  }
  orMutexUnlock(&lock);
  if (!alias) free(m);
}

void orAliasNew(void *ptr, size_t bytes) {
  if (OR_UNLIKELY(atomic_load_explicit(&is_wanted, memory_order_relaxed))) orAliasMake(ptr, bytes);
}

bool orAliasesWanted(bool wanted) { return atomic_exchange(&is_wanted, wanted); }

void orAliasForget(void *ptr) {
  if (!atomic_load_explicit(&orAliasCount, memory_order_relaxed)) return;
  orMutexLock(&lock);
  orAlias *m = find(ptr);
  if (m) {
    orTreeRemove(&tree, &m->node);
    if (m->guarded) atomic_fetch_sub_explicit(&guarded_count, 1, memory_order_relaxed);
    orUnmap(aliasOf(m), sizeOf(m));
    atomic_fetch_sub_explicit(&orAliasCount, 1, memory_order_relaxed);
  }
  orMutexUnlock(&lock);
  if (m) free(m->guards);
  free(m);
}

void *orAliasAddress(const void *ptr) {
  orMutexLock(&lock);
  const orAlias *m = find(ptr);
  ptrdiff_t distance = m ? m->distance : 0;
  orMutexUnlock(&lock);
  return (char *)(uintptr_t)ptr + distance;
}

/* ---- guards (lock held) ---- */

/* Maps the alias's pages at the block's place again, for a guard that mprotect cannot remove. */
static bool mapAnew(const orAlias *m, size_t offset, size_t bytes) {
  return mremap(aliasOf(m) + offset, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
                (char *)blockOf(m) + offset) != MAP_FAILED;
}

static bool protect(const orAlias *m, size_t page, size_t count, uint8_t guard) {
  static const int protections[] = {[OR_GUARD_NOTHING] = PROT_READ | PROT_WRITE,
                                    [OR_GUARD_WRITES] = PROT_READ,
                                    [OR_GUARD_ALL] = PROT_NONE};
  size_t size = orPageSize(), offset = page * size, bytes = count * size;
  if (!mprotect((char *)blockOf(m) + offset, bytes, protections[guard])) return true;
  return guard == OR_GUARD_NOTHING && mapAnew(m, offset, bytes);
}

/* Sets the count of guarded pages. */
static void setGuarded(orAlias *m, size_t count) {
  if (!m->guarded && count) atomic_fetch_add_explicit(&guarded_count, 1, memory_order_relaxed);
  if (m->guarded && !count) atomic_fetch_sub_explicit(&guarded_count, 1, memory_order_relaxed);
  m->guarded = count;
}

/* If the mapping cannot be split once more (vm.max_map_count), the system may refuse to change a
 * part, but not the whole. An access may be missed then; a guard that stayed would end the
 * program. */
static bool liftAll(orAlias *m) {
  bool lifted = protect(m, 0, pagesOf(m), OR_GUARD_NOTHING);
  if (lifted && m->guards) memset(m->guards, OR_GUARD_NOTHING, pagesOf(m));
  if (lifted) setGuarded(m, 0);
  return lifted;
}

/* One call for each run of pages that change to the same guard. */
static void apply(orAlias *m, const uint8_t *wanted, orPages where) {
  size_t count = 0;
  bool stuck = false;
  for (size_t i = where.from, end; i < where.to; i = end) {
    for (end = i + 1; end < where.to && wanted[end] == wanted[i] && m->guards[end] == m->guards[i];)
      end++;
    if (m->guards[i] != wanted[i] && protect(m, i, end - i, wanted[i]))
      memset(m->guards + i, wanted[i], end - i);
    stuck |= m->guards[i] > wanted[i];
    if (m->guards[i]) count += end - i;
  }
  m->where = count ? where : (orPages){0, 0};
  setGuarded(m, count);
  if (stuck) liftAll(m);
}

static orPages both(orPages a, orPages b) {
  if (a.from >= a.to) return b;
  if (b.from >= b.to) return a;
  return (orPages){a.from < b.from ? a.from : b.from, a.to > b.to ? a.to : b.to};
}

static struct {
  bool again;
  orChooseGuards choose;
} change;

static void guard(orTreeNode *node) {
  orAlias *m = (orAlias *)node;
  size_t pages = pagesOf(m);
  if (change.again && !m->guarded) return;
  if (!m->guards) m->guards = calloc(2, pages);
  if (!m->guards) return;
  uint8_t *wanted = m->guards + pages;
  orPages chosen = change.choose(node->begin, pages, wanted);
  apply(m, wanted, both(chosen, m->where));
  if (chosen.from < chosen.to) memset(wanted + chosen.from, 0, chosen.to - chosen.from);
}

/* ---- for page_guard.c ---- */

void orAliasGuard(uintptr_t begin, uintptr_t end, bool again, orChooseGuards choose) {
  if (!atomic_load_explicit(again ? &guarded_count : &orAliasCount, memory_order_relaxed)) return;
  orMutexLock(&lock);
  change.again = again;
  change.choose = choose;
  orTreeEach(&tree, begin, end, guard);
  orMutexUnlock(&lock);
}

bool orAliasGuardAt(uintptr_t address, orGuard *guard) {
  orMutexLock(&lock);
  const orAlias *m = find((const void *)address);
  if (m)
    *guard = m->guards ? m->guards[(address - m->node.begin) / orPageSize()] : OR_GUARD_NOTHING;
  orMutexUnlock(&lock);
  return m != NULL;
}

bool orAliasLift(uintptr_t address) {
  orMutexLock(&lock);
  orAlias *m = find((const void *)address);
  size_t page = m ? (address - m->node.begin) / orPageSize() : 0;
  bool lifted = m && (protect(m, page, 1, OR_GUARD_NOTHING) || liftAll(m));
  if (lifted && m->guards && m->guards[page]) {
    m->guards[page] = OR_GUARD_NOTHING;
    setGuarded(m, m->guarded - 1);
  }
  orMutexUnlock(&lock);
  return lifted;
}
