# Targets: demo, test, test-all, test-drivers, soak, fuzz, conformance, upstream, judges, integration,
# Targets: libraries, lint, format, sanitize, bench, build, ctest, ctest-aarch64, ctest-page64k, clang,
# Targets: model, mutate, debug, docs, compile_commands, wheels, clean.
# Everything runs in .venv, which is made on first use; a machine needs python3 (3.10 or later),
# a C and a C++ compiler, and make. TORCH=2.15.0: the same with another PyTorch, in .venv-2.15.0.

PYTHON ?= python3
PINNED_TORCH := $(shell sed -n 's/^torch==//p' .ci/build.txt)
TORCH ?= $(PINNED_TORCH)
VENV := .venv$(addprefix -,$(filter-out $(PINNED_TORCH),$(TORCH)))
PY := $(VENV)/bin/python
include csrc/core.mk
# The library's name in a program, as in setup.py.
CORE := libopenreg.so.$(shell sed -n 's/^#define OPENREG_VERSION_MAJOR //p' $(CORE_HEADER))
CC ?= cc

.PHONY: help demo test test-all test-drivers soak fuzz conformance upstream judges integration libraries
.PHONY: lint format sanitize bench build ctest ctest-aarch64 ctest-aarch64-files ctest-page64k
.PHONY: ctest-page64k-files ctest-musl
.PHONY: ctest-musl-files clang clang-files debug docs env clean compile_commands c-commands wheels
.PHONY: compile ctest-files sanitize-core sanitize-operators sanitize-programs sanitize-files
.PHONY: bench-files soak-files fuzz-files fuzz-run lint-analyze
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# Targets: //p' Makefile

# ---- Environment and build ----

BUILD_STAMP := $(VENV)/build.stamp
ENV_STAMP := $(VENV)/requirements.stamp
INSTALL_STAMP := $(VENV)/install.stamp
DEMO_STAMP := $(VENV)/demo.stamp

env: $(ENV_STAMP)

# pip shows its bars in a terminal.
$(BUILD_STAMP): .ci/build.txt
	@echo '== $(VENV), with what compiles the package'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' .ci/build.txt > $(VENV)/build.txt
	$(PY) -m pip install --disable-pip-version-check -r $(VENV)/build.txt
	touch $@

$(ENV_STAMP): .ci/requirements.txt $(BUILD_STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -r .ci/requirements.txt
	touch $@

# Its result is beside the sources, for one PyTorch at a time; the objects of each are kept, so that a
# change of TORCH copies two files.
compile: $(BUILD_STAMP)
	@echo '== the core and the shim'
	$(PY) setup.py --quiet build_ext --inplace

# The editable install finds everything compiled; it is repeated when the metadata changes, of which the
# version is in the header, and which PyTorch it requires in build.txt.
$(INSTALL_STAMP): pyproject.toml setup.py .ci/build.txt $(CORE_HEADER) | $(ENV_STAMP) compile
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  -e '.[test,examples]'
	touch $@

# Bytecode as pip leaves it beside an installed package: importing takes two thirds of the time.
build: $(ENV_STAMP) compile $(INSTALL_STAMP)
	@$(PY) -m compileall -q torch_openreg

# Of the extras it needs the examples' alone, which an install for `build` has too.
$(DEMO_STAMP): pyproject.toml setup.py .ci/build.txt $(CORE_HEADER) | compile
	@echo '== the package, with what the examples need'
	$(PY) -m pip install --disable-pip-version-check --no-build-isolation -e '.[examples]'
	touch $@

demo: compile $(if $(wildcard $(INSTALL_STAMP)),$(INSTALL_STAMP),$(DEMO_STAMP))
	@echo '== the digits, on openreg:1 and on the CPU'
	$(PY) docs/examples/digits.py

# Files of tests run side by side, in the order of their names; the tests of a file in one process. One
# more than there are cores, as many tests wait for a program or a timeout.
SIDE_BY_SIDE = -n $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8))) --dist loadfile --no-loadscope-reorder

# What a change can break, in ten minutes.
test: build ctest
	$(PY) -m pytest $(SIDE_BY_SIDE) tests

# And what is marked slow: the same again with other settings, and larger samples.
test-all: test
	$(PY) -m pytest $(SIDE_BY_SIDE) -m slow tests

# The same tests on other drivers: the example plugin with `map` and without, and the OpenCL driver; or DRIVER:
# vendor, vendor_nomap, opencl or paths of libraries, and ARGS: pytest's. What fails there is declared in
# tests/drivers/declared.py. Memory that the CPU does not reach has the areas that call operators; those of
# commands and of other suites (judges, libraries, packaging, upstream) are about programs of their own.
# `vendor_nomap` has none of those in cuda and distributed: without kernels of its own each operator waits for its
# stream, and their programs wait behind gates of their own.
DRIVER ?= vendor vendor_nomap $(if $(OPENCL),opencl)
AREAS_vendor_nomap := $(addprefix tests/,compile conformance device graphs integration kernels memory operators \
  sanitizer schedules streams)
AREAS_opencl := $(AREAS_vendor_nomap) $(addprefix tests/,cuda distributed)

test-drivers: build ctest
	@failed=; for driver in $(DRIVER); do tests=tests; \
	  case $$driver in */*) library=$$driver;; *) library=$(CURDIR)/$(D_debug)/lib$$driver.so;; esac; \
	  case $$driver in vendor_nomap) tests='$(AREAS_vendor_nomap)';; opencl) tests='$(AREAS_opencl)';; esac; \
	  echo "== $$library"; \
	  OPENREG_PLUGIN=$$library OPENREG_DEVICE_COUNT=2 PYTHONPATH=$(CURDIR)/tests \
	    $(PY) -m pytest -p drivers.plugin $(SIDE_BY_SIDE) $(or $(ARGS),$$tests) || failed="$$failed $$driver"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# All samples of PyTorch's operator database, random programs over views and dtypes, and random programs of
# which the sanitizer says nothing; `make test` takes one of each operator and dtype, or a few. ARGS: of the
# database alone, see --help.
conformance: build
	$(PY) tests/conformance/sweep.py $(ARGS)
	$(if $(ARGS),,OPENREG_VIEW_PROGRAMS=20000 $(PY) -m pytest -n auto tests/operators/test_view_programs.py)
	$(if $(ARGS),,OPENREG_ORDERED_PROGRAMS=1000 $(PY) -m pytest tests/sanitizer/test_sanitizer_programs.py)

# PyTorch's own tests of devices, from a source tree PYTORCH_SOURCE. FILES, SAMPLE, SEED, FAILED=1, LIMIT
# and PAGE: see docs/upstream.md. It goes on where it was stopped.
UPSTREAM_STAMP := $(VENV)/upstream.stamp

$(UPSTREAM_STAMP): pyproject.toml | build
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[upstream]'
	touch $@

upstream: PAGE ?= docs/upstream.md
upstream: build $(UPSTREAM_STAMP)
	PYTHONPATH=$(CURDIR)/tests $(PY) -m upstream --source '$(PYTORCH_SOURCE)' --files '$(FILES)' --jobs $(JOBS) \
	  --page '$(PAGE)' $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(LIMIT),--limit $(LIMIT)) $(if $(FAILED),--failed)

# TorchCTS, a public conformance suite for backends, of a pinned version. FILES="rng errors", LIMIT and PAGE: see
# docs/upstream.md. `make test-all` runs a part of it where it is installed.
JUDGES_STAMP := $(VENV)/judges.stamp

$(JUDGES_STAMP): .ci/judges.txt | build
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r .ci/judges.txt
	touch $@

judges: build $(JUDGES_STAMP)
	PYTHONPATH=$(CURDIR)/tests $(PY) -m judges --files '$(FILES)' --jobs $(JOBS) \
	  $(if $(LIMIT),--limit $(LIMIT)) $(if $(FILES),,--page '$(PAGE)')

# What is too heavy for every run of the tests: other libraries, which only this installs, and four
# processes.
INTEGRATION_STAMP := $(VENV)/integration.stamp

$(INTEGRATION_STAMP): pyproject.toml | build
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  -e '.[integration]'
	touch $@

integration: build $(INTEGRATION_STAMP)
	OPENREG_INTEGRATION=1 $(PY) -m pytest tests/integration tests/distributed/test_distributed_training.py \
	  tests/packaging/test_docs.py

# Other libraries' own tests for CUDA, with the versions that .ci/libraries.txt pins. LIBRARY, SOURCE,
# SANITIZER=1, LIMIT, CONTINUE=1, ARGS and PAGE: see docs/libraries.md. Their environment
# sees the packages of $(VENV) and changes none of them.
LIBRARIES_VENV := $(VENV)/libraries
LIBRARIES_PY := $(LIBRARIES_VENV)/bin/python
LIBRARIES_STAMP := $(VENV)/libraries.stamp
SITE_PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(LIBRARIES_STAMP): .ci/libraries.txt | build
	test -x $(LIBRARIES_PY) || $(PY) -m venv --without-pip $(LIBRARIES_VENV)
	echo "import site; site.addsitedir('$$($(PY) $(SITE_PACKAGES))')" \
	  > "$$($(LIBRARIES_PY) $(SITE_PACKAGES))/outer.pth"
	$(LIBRARIES_PY) -m pip install --quiet --disable-pip-version-check -r .ci/libraries.txt
	sed '1s|.*|#!$(CURDIR)/$(LIBRARIES_PY)|' $(VENV)/bin/torchrun > $(LIBRARIES_VENV)/bin/torchrun
	chmod +x $(LIBRARIES_VENV)/bin/torchrun
	touch $@

libraries: PAGE ?= docs/libraries.md
libraries: build $(LIBRARIES_STAMP)
	PYTHONPATH=$(CURDIR)/tests $(LIBRARIES_PY) -m libraries --library '$(LIBRARY)' --source '$(SOURCE)' \
	  --jobs $(JOBS) --page '$(PAGE)' $(if $(LIMIT),--limit $(LIMIT)) \
	  $(if $(SANITIZER),--sanitizer) $(if $(CONTINUE),--continue) -- $(ARGS)

# The site of the documentation, in build/docs. -E: Sphinx does not read a page again for what conf.py adds to it.
DOCS_STAMP := $(VENV)/docs.stamp

$(DOCS_STAMP): pyproject.toml | build
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[docs,ppe]'
	touch $@

docs: build $(DOCS_STAMP)
	$(PY) -m sphinx -E -W --keep-going --quiet -j auto -c docs -d build/doctrees . build/docs
	@echo 'build/docs/index.html'

# ---- The core without PyTorch: one rule set for each kind of build ----

CORE_SOURCES := $(wildcard $(CORE_FILES))
TEST_SOURCES := $(wildcard tests/c/*.c)
PLUGIN_SOURCES := $(wildcard tests/c/plugins/*.c)
VENDOR_SOURCES := $(wildcard docs/examples/vendor/*.c)
OPENCL_SOURCES := $(wildcard plugins/opencl/*.c)
# The driver is built and tested where OpenCL is installed (.ci/packages.txt).
OPENCL := $(wildcard /usr/include/CL/cl.h)
# opencl.py compiles opencl.c, where OpenCL is installed.
BENCH_SOURCES := $(filter-out benchmarks/opencl.c,$(wildcard benchmarks/*.c))
INPUT_CORPUS := $(wildcard tests/c/inputs/corpus/*)
# The runtime is the core without its tools.
RUNTIME_SOURCES := $(filter-out csrc/openreg/tools/% csrc/openreg/sanitizer/%,$(CORE_SOURCES))
# The calls of the system that fail in the failing core, by the linker's --wrap (tests/c/failing/failing.c).
FAILING := malloc calloc realloc aligned_alloc strdup mmap munmap madvise mprotect memfd_create ftruncate \
  pthread_create fopen

C_FLAGS := $(CORE_FLAGS) $(CORE_INCLUDES) -MMD -MP
# OR_DEBUG: the core's assertions (OR_ASSERT). Benchmarks run on the release build.
FLAGS_release := -O2 -g
FLAGS_debug := -O2 -g -DOR_DEBUG
FLAGS_tsan := -O1 -g -DOR_DEBUG -fsanitize=thread -fno-omit-frame-pointer
FLAGS_asan := -O1 -g -DOR_DEBUG -fsanitize=address -fno-omit-frame-pointer
FLAGS_ubsan := -O1 -g -DOR_DEBUG -fsanitize=undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# libFuzzer is clang's.
FLAGS_fuzz := -O1 -g -DOR_DEBUG -DOR_LIBFUZZER -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
FUZZ_CC ?= clang
build/ctest/fuzz/%: CC := $(FUZZ_CC)
FLAGS_aarch64 := $(FLAGS_debug)
AARCH64_CC ?= aarch64-linux-gnu-gcc
build/ctest/aarch64/%: CC := $(AARCH64_CC)
# musl-gcc has no headers of the kernel: the system's come after its own. A thread of musl's has a stack of
# 128 KiB, or what the program says.
FLAGS_musl := $(FLAGS_debug) -Wl,-z,stack-size=0x800000 -idirafter /usr/include \
  -idirafter /usr/include/$(shell $(CC) -print-multiarch 2>/dev/null)
MUSL_CC ?= musl-gcc
build/ctest/musl/%: CC := $(MUSL_CC)
FLAGS_clang := $(FLAGS_debug)
CLANG ?= clang
build/ctest/clang/%: CC := $(CLANG)

# One line for each file made; V=1 shows the commands.
say = $(if $(V),,@echo '  $@'; )

# What a program is made of, without the headers that its .d file names: the compiler would write
# that file anew for the last of them alone, and a change of another would not make it again.
inputs = $(filter-out %.h,$^)

# $(1): release, debug, tsan, asan, ubsan, fuzz, aarch64, musl or clang.
define core_build
D_$(1) := build/ctest/$(1)
CORE_OBJECTS_$(1) := $$(CORE_SOURCES:csrc/openreg/%.c=build/ctest/$(1)/core/%.o)
TEST_OBJECTS_$(1) := $$(TEST_SOURCES:tests/c/%.c=build/ctest/$(1)/tests/%.o)

$$(D_$(1))/core/%.o: csrc/openreg/%.c Makefile
	@mkdir -p $$(@D)
	$$(say)$$(CC) $$(C_FLAGS) $$(FLAGS_$(1)) -c $$< -o $$@
$$(D_$(1))/tests/%.o: tests/c/%.c Makefile
	@mkdir -p $$(@D)
	$$(say)$$(CC) $$(C_FLAGS) $$(FLAGS_$(1)) -Itests/c -c $$< -o $$@
$$(D_$(1))/$(CORE): $$(CORE_OBJECTS_$(1))
	$$(say)$$(CC) -shared $$(FLAGS_$(1)) -Wl,-soname,$(CORE) $$^ -o $$@ $(CORE_LINK)
$$(D_$(1))/run-tests: $$(TEST_OBJECTS_$(1)) $$(D_$(1))/$(CORE)
	$$(say)$$(CC) $$(FLAGS_$(1)) $$^ -o $$@ -Wl,-rpath,'$$$$ORIGIN' -pthread -ldl -lm
$$(D_$(1))/failing/%.o: tests/c/failing/%.c Makefile
	@mkdir -p $$(@D)
	$$(say)$$(CC) $$(C_FLAGS) $$(FLAGS_$(1)) -Itests/c -c $$< -o $$@
$$(D_$(1))/failing/$(CORE): $$(CORE_OBJECTS_$(1)) $$(D_$(1))/failing/failing.o
	$$(say)$$(CC) -shared $$(FLAGS_$(1)) -Wl,-soname,$(CORE) -Wl,-Bsymbolic-functions $$(FAILING:%=-Wl,--wrap=%) \
	  $$^ -o $$@ -pthread -ldl
$$(D_$(1))/walk: $$(D_$(1))/failing/walk.o $$(D_$(1))/failing/$(CORE)
	$$(say)$$(CC) $$(FLAGS_$(1)) $$^ -o $$@ -Wl,-rpath,'$$$$ORIGIN/failing' -pthread
$$(D_$(1))/libvendor.so: $$(VENDOR_SOURCES) $$(D_$(1))/$(CORE)
	$$(say)$$(CC) -shared $$(C_FLAGS) $$(FLAGS_$(1)) -MF $$@.d $$(inputs) -o $$@ -Wl,-rpath,'$$$$ORIGIN'
$$(D_$(1))/libvendor_nomap.so: $$(VENDOR_SOURCES) $$(D_$(1))/$(CORE)
	$$(say)$$(CC) -shared $$(C_FLAGS) $$(FLAGS_$(1)) -DVENDOR_NO_MAP -MF $$@.d $$(inputs) -o $$@ \
	  -Wl,-rpath,'$$$$ORIGIN'
# A plugin that was built against the first version of the header.
$$(D_$(1))/libvendor_abi.so: $$(VENDOR_SOURCES) $$(D_$(1))/$(CORE) tests/c/abi/openreg.h
	$$(say)$$(CC) -shared -Itests/c/abi $$(C_FLAGS) $$(FLAGS_$(1)) -MF $$@.d $$(inputs) -o $$@ \
	  -Wl,-rpath,'$$$$ORIGIN'
$$(D_$(1))/libopencl.so: $$(OPENCL_SOURCES) $$(wildcard plugins/opencl/*.h) plugins/opencl/kernels.cl \
    $$(D_$(1))/$(CORE)
	$$(say)$$(CC) -shared $$(C_FLAGS) $$(FLAGS_$(1)) -Wa,-Iplugins/opencl -MF $$@.d \
	  $$(filter-out %.cl,$$(inputs)) -o $$@ -Wl,-rpath,'$$$$ORIGIN' -lOpenCL -lm
$$(D_$(1))/bare: tests/c/bare/program.c $$(RUNTIME_SOURCES:csrc/openreg/%.c=$$(D_$(1))/core/%.o)
	$$(say)$$(CC) $$(C_FLAGS) $$(FLAGS_$(1)) -MF $$@.d $$(inputs) -o $$@ -ldl
# With config.c inside of it.
$$(D_$(1))/inputs: tests/c/inputs/program.c $$(filter-out %/config.o,$$(CORE_OBJECTS_$(1))) $$(INPUT_CORPUS)
	$$(say)$$(CC) $$(C_FLAGS) $$(FLAGS_$(1)) $$(if $$(filter fuzz,$(1)),-fsanitize=fuzzer) -MF $$@.d \
	  $$< $$(filter %.o,$$^) -o $$@ -ldl
	@rm -rf $$(@D)/corpus && cp -r tests/c/inputs/corpus $$(@D)/corpus
$$(D_$(1))/libpage64k.so: tests/c/preload/page64k.c
	@mkdir -p $$(@D)
	$$(say)$$(CC) -shared $$(C_FLAGS) $$(FLAGS_$(1)) -MF $$@.d $$(inputs) -o $$@ -ldl
$$(D_$(1))/lib%.so: tests/c/plugins/%.c $$(D_$(1))/$(CORE)
	$$(say)$$(CC) -shared $$(C_FLAGS) $$(FLAGS_$(1)) -MF $$@.d $$< $$(D_$(1))/$(CORE) -o $$@ -Wl,-rpath,'$$$$ORIGIN'

FILES_$(1) := $$(D_$(1))/bare $$(D_$(1))/inputs $$(if $$(TEST_SOURCES),$$(D_$(1))/run-tests,$$(D_$(1))/$(CORE)) \
  $$(if $$(VENDOR_SOURCES),$$(D_$(1))/libvendor.so $$(D_$(1))/libvendor_nomap.so \
    $$(D_$(1))/libvendor_abi.so) \
  $$(if $$(filter release debug,$(1)),$$(if $$(OPENCL),$$(D_$(1))/libopencl.so)) \
  $$(PLUGIN_SOURCES:tests/c/plugins/%.c=$$(D_$(1))/lib%.so) $$(D_$(1))/walk
-include $$(wildcard $$(D_$(1))/*/*/*.d $$(D_$(1))/*/*.d $$(D_$(1))/*.d)
endef
$(foreach kind,release debug tsan asan ubsan fuzz aarch64 musl clang,$(eval $(call core_build,$(kind))))

# Two makes at once in one tree would write the same objects.
locked = @mkdir -p build && flock build/lock $(MAKE) --no-print-directory -j $(JOBS)
JOBS ?= $(shell nproc)
# A program's C tests side by side, as many of them wait: its name, or a command that ends with it.
in_batches = $(1) --list | xargs -P $(JOBS) -n 40 $(1)

ctest-files: $(FILES_debug)
sanitize-files: $(FILES_tsan) $(FILES_asan) $(FILES_ubsan)

ctest:
	$(locked) ctest-files

# The C tests over another C library (Debian's package: musl-tools), of which PyTorch has no wheels.
ctest-musl-files: $(FILES_musl)

ctest-musl:
	$(locked) ctest-musl-files
	$(call in_batches,$(D_musl)/run-tests)

# Whether clang takes the core, with which the C tests pass then, and the shim's files: SECONDS=60: what it can
# read of them in that time, others each day.
clang-files: $(FILES_clang)

clang: compile compile_commands
	$(locked) clang-files
	$(call in_batches,$(D_clang)/run-tests)
	$(PY) .ci/clang.py --compiler '$(CLANG)++' $(if $(filter command line,$(origin SECONDS)),--seconds $(SECONDS))

# The C tests where pages have 64 KiB: every one passes there.
ctest-page64k-files: ctest-files $(D_debug)/libpage64k.so

ctest-page64k:
	$(locked) ctest-page64k-files
	$(call in_batches,env LD_PRELOAD=$(CURDIR)/$(D_debug)/libpage64k.so $(D_debug)/run-tests)

# The C tests on Arm64, in an emulator, but for those that tests/c/aarch64.txt names. AARCH64_ROOT: where that
# processor's C library is. A device has little memory, as the emulator visits each page of an address range.
AARCH64_ROOT ?= /usr/aarch64-linux-gnu
ctest-aarch64: export QEMU_LD_PREFIX = $(AARCH64_ROOT)
ctest-aarch64: export OPENREG_TEST_EMULATOR = qemu-aarch64
ctest-aarch64: export OPENREG_DEVICE_MEMORY = 256M
ctest-aarch64: export OPENREG_STRESS_PROGRAMS = 20
ctest-aarch64: export OPENREG_TEST_TIMEOUT_SCALE ?= 5

ctest-aarch64-files: $(FILES_aarch64)

ctest-aarch64:
	$(locked) ctest-aarch64-files
	@sed '/^#/d; s/ .*//' tests/c/aarch64.txt > $(D_aarch64)/except
	@qemu-aarch64 $(D_aarch64)/run-tests --list | grep -vxF -f $(D_aarch64)/except > $(D_aarch64)/names
	xargs -P $(JOBS) -n 40 qemu-aarch64 $(D_aarch64)/run-tests < $(D_aarch64)/names

# The C tests, and the Python suite, over the core with its assertions, which is preloaded. ARGS: pytest's.
# The core that is loaded first has debug information, and is a second file beside the package's: two
# tests say just that.
debug: build ctest
	$(call in_batches,$(D_debug)/run-tests)
	LD_PRELOAD=$(CURDIR)/$(D_debug)/$(CORE) $(PY) -m pytest $(SIDE_BY_SIDE) \
	  --ignore tests/device/test_core.py --deselect tests/device/test_gdb.py::test_gdb_names_missing_debug_information \
	  --deselect tests/packaging/test_packaging.py::test_python_process_has_one_runtime $(or $(ARGS),tests)

# Random programs and calls of the core while faults, resets and forks happen in their midst, for SECONDS, in
# processes with settings of their own, in the build KIND (debug, tsan, asan or ubsan). `make test` has a short one.
SECONDS ?= 1800
KIND ?= debug

soak-files: $(FILES_$(KIND))

soak:
	$(locked) soak-files KIND=$(KIND)
	TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 OPENREG_TEST_TIMEOUT_SCALE=0 \
	  OPENREG_STRESS_SECONDS=$(SECONDS) $(D_$(KIND))/run-tests soak

# What enters as text or bytes, by libFuzzer, for SECONDS: half of them before the devices are made, which no
# factory can be registered after. What it finds new is kept in build/fuzz for the next run. Without libFuzzer
# the kept inputs are read once.
fuzz-files: $(D_fuzz)/inputs

fuzz:
	@if echo 'int LLVMFuzzerTestOneInput(const void *d, unsigned long n) { return d && n > 9; }' | \
	    $(FUZZ_CC) -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null; then \
	  $(MAKE) --no-print-directory fuzz-run; \
	else \
	  echo '$(FUZZ_CC) has no libFuzzer here (Debian: clang, libclang-rt-dev): only the kept inputs are read'; \
	  $(MAKE) --no-print-directory ctest && \
	    $(D_debug)/run-tests inputs_that_are_kept inputs_that_are_kept_for_devices; \
	fi

fuzz-run:
	$(locked) fuzz-files
	@for devices in '' devices; do \
	  folder=build/fuzz/inputs$${devices:+-devices}; mkdir -p $$folder; \
	  env $${devices:+OPENREG_INPUTS_WITH_DEVICES=1 ASAN_OPTIONS=detect_leaks=0} $(D_fuzz)/inputs \
	    -max_total_time=$$((($(SECONDS) + 1) / 2)) -max_len=600 -timeout=20 -rss_limit_mb=4096 \
	    -use_value_profile=1 -artifact_prefix=build/fuzz/ $$folder tests/c/inputs/corpus \
	    >build/fuzz/log 2>&1 || { tail -60 build/fuzz/log; exit 1; }; \
	  echo "== $$folder: $$(grep -o 'Done.*' build/fuzz/log), $$(ls $$folder | wc -l) inputs kept"; \
	done

# SHORT=1: fewer random programs, for continuous integration.
STRESS_PROGRAMS ?= $(if $(SHORT),300,10000)
RANDOM_PROGRAMS ?= $(if $(SHORT),100,1000)
# One system call out of so many fails (tests/c/failing/walk.c).
WALK_SAMPLE ?= $(if $(SHORT),5,1)
sanitize: sanitize-core sanitize-operators sanitize-programs

# ThreadSanitizer has a program sleep for a second at its end; the walk starts hundreds.
sanitize-core:
	$(locked) sanitize-files
	@for kind in tsan asan ubsan; do \
	  echo "== $$kind"; \
	  export TSAN_OPTIONS=halt_on_error=1:atexit_sleep_ms=50 UBSAN_OPTIONS=print_stacktrace=1 \
	  OPENREG_STRESS_PROGRAMS=$(STRESS_PROGRAMS) OPENREG_WALK_SAMPLE=$(WALK_SAMPLE); \
	  $(call in_batches,build/ctest/$$kind/run-tests) && build/ctest/$$kind/walk || exit 1; \
	done

# PyTorch over the core's ThreadSanitizer build, preloaded: it has the installed one's name. Memory is
# watched in the core alone; the locks of everybody count.
sanitize-operators: build sanitize-core
	@echo "== tsan, $(RANDOM_PROGRAMS) random programs of operators"
	@core=$(CURDIR)/$(D_tsan)/$(CORE); \
	runtime=$$(ldd $$core | sed -n 's/.*tsan.* => \([^ ]*\).*/\1/p'); \
	export LD_PRELOAD="$$runtime $$core" OPENREG_RANDOM_PROGRAMS=$(RANDOM_PROGRAMS) \
	  TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1; \
	$(PY) -c "import torch; torch.openreg.init(); maps = open('/proc/self/maps').read(); \
	  assert '$(D_tsan)/$(CORE)' in maps and 'lib/libopenreg.so' not in maps, maps" && \
	$(PY) -m pytest -v -s tests/streams/test_programs.py

# Programs without races, under torch.openreg.sanitizer; those that are marked racy have to be told.
SANITIZED := streams/test_streams streams/test_events schedules/test_schedules packaging/test_examples

sanitize-programs: build
	@echo "== torch.openreg.sanitizer"
	OPENREG_SANITIZER=1 $(PY) -m pytest $(SIDE_BY_SIDE) $(SANITIZED:%=tests/%.py)

# The models of waits, the queue and the dispatcher in tests/model, each with and without the faults
# that it plants: .ci/model.py. What its packages are missing for is left out, in a line.
.PHONY: model
model:
	$(PYTHON) .ci/model.py

# The core with one change at a time, over the C tests: .ci/mutate.py. FILES="worker host_wait", SAMPLE, SEED,
# LIMIT (seconds of tests for a mutant) and AGAIN=1.
MUTANT := -O1 -w -DOR_DEBUG
MUTATE := $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(if $(LIMIT),--limit $(LIMIT)) \
  $(if $(AGAIN),--again) $(if $(OPERATORS),--operators '$(OPERATORS)')

.PHONY: mutate
mutate: ctest
	$(PYTHON) .ci/mutate.py --core $(CORE) --tests $(D_debug) --files '$(FILES)' $(MUTATE) \
	  --compile '$(CC) $(filter-out -W% -M%,$(C_FLAGS)) $(MUTANT)' \
	  --link '$(CC) -shared -Wl,-soname,$(CORE) -Wl,-Bsymbolic-functions'

# ---- Benchmarks ----

BENCH_SCRIPTS := $(filter-out benchmarks/run.py,$(wildcard benchmarks/*.py))
BENCH_PROGRAMS := $(BENCH_SOURCES:benchmarks/%.c=build/bench/%)

build/bench/%: benchmarks/%.c build/ctest/release/$(CORE)
	@mkdir -p $(@D)
	$(say)$(CC) $(C_FLAGS) $(FLAGS_release) -MF $@.d $(inputs) -o $@ -Wl,-rpath,$(CURDIR)/build/ctest/release \
	  -pthread -ldl -lm
-include $(wildcard build/bench/*.d)

bench-files: $(BENCH_PROGRAMS)

bench: build
	$(locked) bench-files
	$(PY) benchmarks/run.py $(BENCH_PROGRAMS) $(BENCH_SCRIPTS)

# ---- For clangd and other tools ----

# compile_commands.json: the C files as in the debug build, so with their assertions, and the shim as setup.py
# compiles it. Nothing is compiled.
compile_commands: $(ENV_STAMP)
	@$(MAKE) -s --no-print-directory c-commands | $(PY) setup.py --quiet compile_commands

# An object in a line for each of the files $(1), with the flags $(2).
c_commands = $(foreach file,$(1),$(info {"directory": "$(CURDIR)", "file": "$(file)", "command": \
  "$(CC) $(filter-out -MMD -MP,$(C_FLAGS)) $(FLAGS_debug) $(2) -c $(file)"}))

# The C files' part, on stdout.
c-commands:
	$(call c_commands,$(CORE_SOURCES) $(PLUGIN_SOURCES) $(VENDOR_SOURCES) $(BENCH_SOURCES))
	$(call c_commands,$(TEST_SOURCES),-Itests/c)
	@:

# ---- Release: docs/releasing.md ----

# In dist: the source distribution, and for each of these Pythons that is there a wheel for the PyTorch
# of .venv.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13

wheels: build
	$(PY) .ci/wheels.py dist $(PYTHONS)

# ---- Lint ----

FORMATTED = $(shell git ls-files '*.c' '*.h' '*.cpp' '*.hpp')
PROSE = $(shell git ls-files '*.md')
ANALYZED := $(CORE_SOURCES:csrc/openreg/%.c=build/lint/%.o)

build/lint/%.o: csrc/openreg/%.c
	@mkdir -p $(@D)
	$(say)$(CC) $(C_FLAGS) -O1 -fanalyzer -c $< -o $@
-include $(wildcard build/lint/*/*.d)

lint-analyze: $(ANALYZED)
	$(PYTHON) .ci/layers.py csrc/openreg $(ANALYZED)

lint: $(ENV_STAMP)
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	! grep -nE '^.{101,}' $(FORMATTED)
	! git grep -nwFf .ci/retired.txt -- '*.c' '*.h' '*.cpp' '*.hpp' '*.py' '*.md' '*.pml' ':!CHANGELOG.md'
	$(PYTHON) .ci/prose.py $(PROSE)
	$(PYTHON) .ci/commits.py
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PYTHON) .ci/includes.py csrc
	$(locked) lint-analyze

format: $(ENV_STAMP)
	$(VENV)/bin/clang-format -i $(FORMATTED)
	$(PYTHON) .ci/prose.py --fix $(PROSE)
	$(VENV)/bin/ruff check --fix --quiet .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build dist *.egg-info torch_openreg/lib torch_openreg/include torch_openreg/*.so \
	  torch_openreg/_build_info.py compile_commands.json
	rm -f $(INSTALL_STAMP) $(DEMO_STAMP) $(INTEGRATION_STAMP) $(UPSTREAM_STAMP) $(JUDGES_STAMP) \
	  $(LIBRARIES_STAMP) $(DOCS_STAMP)
