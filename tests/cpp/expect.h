/*
 * What the programs here share: an expectation that fails is printed and counted.
 */
#pragma once

#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>
#include <string>

inline int failures = 0;

inline void expect(bool ok, const char *what, const char *file, int line) {
  if (ok) return;
  std::printf("%s:%d: %s\n", file, line, what);
  failures++;
}
#define EXPECT(condition) expect(condition, #condition, __FILE__, __LINE__)

template <typename F>
bool throwsWith(F &&f, const std::string &text) {
  try {
    f();
  } catch (const c10::Error &error) {
    const std::string message = error.what_without_backtrace();
    if (message.find(text) != std::string::npos) return true;
    std::printf("unexpected text: %s\n", message.c_str());
  }
  return false;
}

/* Runs the parts of a program; the number of expectations that failed. */
template <typename... Parts>
int runParts(Parts... parts) {
  failures = 0;
  try {
    (parts(), ...);
  } catch (const std::exception &error) {
    std::printf("unexpected exception: %s\n", error.what());
    failures++;
  }
  std::fflush(stdout);
  return failures;
}

#define PROGRAM extern "C" __attribute__((visibility("default"))) int
