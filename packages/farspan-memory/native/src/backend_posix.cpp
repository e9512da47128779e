// Real aliasing without a GPU: the chunks are pieces of one memfd, mapped at several addresses.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "backend.h"

namespace farspan {
namespace {

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// One file, since a file a chunk ends at the limit of open files (20,000 chunks). Sparse: a page
// takes memory when it is touched, and memfd is bounded by main memory alone, so that the capacity
// is the allocator's to keep. Chunks that are adjacent in the file are mapped in one call: the
// kernel allows 65,530 mappings a process, after which malloc itself fails.
class PosixBackend : public HostBackend {
   public:
    explicit PosixBackend(const farspan_options& options) : HostBackend(options) {
        file_ = memfd_create("farspan", MFD_CLOEXEC);
        if (file_ < 0) throw std::runtime_error(std::string("memfd: ") + std::strerror(errno));
    }
    ~PosixBackend() override { close(file_); }

    uint64_t total() override {
        return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
               static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    }
    size_t default_mappings() const override { return 30000; }

   protected:
    bool do_reserve(size_t bytes, uint64_t* address) override {
        const size_t chunk = whole_ * unit_, padded = bytes + chunk;
        void* made = mmap(nullptr, padded, PROT_NONE, NONE_FLAGS, -1, 0);
        if (made == MAP_FAILED) return failed("mmap");
        const auto begin = reinterpret_cast<uint64_t>(made);
        *address = (begin + chunk - 1) / chunk * chunk;
        const uint64_t end = *address + bytes;
        if (*address > begin) munmap(made, *address - begin);
        if (begin + padded > end) munmap(pointer(end), begin + padded - end);
        return true;
    }

    void do_free_range(uint64_t address, size_t bytes) override {
        munmap(pointer(address), bytes);
    }

    bool do_create(Chunk* chunk) override {
        std::set<uint64_t>& free = free_[chunk->width];
        if (!free.empty()) {
            chunk->handle = *free.begin();
            free.erase(free.begin());
            return true;
        }
        if (ftruncate(file_, static_cast<off_t>((units_ + chunk->width) * unit_)) != 0) {
            return failed("ftruncate");
        }
        chunk->handle = units_;
        units_ += chunk->width;
        return true;
    }

    void do_destroy(Chunk chunk) override {
        fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(chunk.handle * unit_),
                  static_cast<off_t>(chunk.width * unit_));
        free_[chunk.width].insert(chunk.handle);
    }

    bool do_map(uint64_t address, const Chunk* chunks, size_t count) override {
        void* made = mmap(pointer(address), width(chunks, count) * unit_, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, file_,
                          static_cast<off_t>(chunks->handle * unit_));
        return made != MAP_FAILED || failed("mmap");
    }

    bool do_access(uint64_t, size_t) override { return true; }

    void do_unmap(uint64_t address, const Chunk* chunks, size_t count) override {
        mmap(pointer(address), width(chunks, count) * unit_, PROT_NONE, NONE_FLAGS | MAP_FIXED, -1,
             0);
    }

    bool joined(Chunk a, Chunk b) const override { return b.handle == a.handle + a.width; }

   private:
    static constexpr int NONE_FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

    bool failed(const char* call) {
        trouble = std::string(call) + ": " + std::strerror(errno);
        return false;
    }

    int file_ = -1;
    uint64_t units_ = 0;                         // of the file; a handle is a place in it
    std::map<size_t, std::set<uint64_t>> free_;  // by width
};

}  // namespace

std::unique_ptr<Backend> posix_backend(const farspan_options& options) {
    return std::make_unique<PosixBackend>(options);
}

}  // namespace farspan
