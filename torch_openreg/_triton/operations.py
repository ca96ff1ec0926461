"""The table of operations: TTIR's name -> the function that writes its C++."""

OPERATIONS = {}


def operation(*names):
    def add(function):
        for name in names:
            OPERATIONS[name] = function
        return function

    return add
