# What the core is made of and with, for the Makefile and for setup.py. Paths begin in the project's folder.
CORE_FILES := csrc/openreg/*/*.c
CORE_HEADER := csrc/openreg/include/openreg.h
CORE_FLAGS := -std=c11 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -D_GNU_SOURCE -pthread
CORE_INCLUDES := -iquote csrc/openreg -Icsrc/openreg/include
# nodelete: the workers run until the process ends, so dlclose() leaves their code where it is.
CORE_LINK := -Wl,-Bsymbolic-functions -Wl,-z,nodelete -pthread -ldl
