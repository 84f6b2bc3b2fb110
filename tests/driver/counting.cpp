//! operator new that counts, for the whole process: the library's allocations come here too.
#include <cstdlib>
#include <new>

namespace driver {
long allocations = 0;
}

void* operator new(size_t size) {
    ++driver::allocations;
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
