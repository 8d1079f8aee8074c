// A simulated accelerator, as torch's PrivateUse1: for tests of programs that were written for real ones.
//
// Its memory cannot be read or written by the host; its operations are queued in streams and run as late as the rules
// allow, or as early, in whichever thread waits (streams.h); it has pinned memory (memory.h), a generator of its own
// (generator.h), and computes with torch's kernels for the CPU (operations.h).
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "operations.h"

namespace simulated {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  static c10::Stream stream(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, 0), id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard guard(lock);
    return stream(next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current, next.id())); }
  bool queryStream(const c10::Stream& s) const override { return query(mark_of(s.id())); }
  void synchronizeStream(const c10::Stream& s) const override { wait_on_host(mark_of(s.id()), "wait", false); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    count("wait");
    synchronize_all();
    check();
  }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (!*event) *event = new Mark;
    auto& mark = *static_cast<Mark*>(*event);
    std::shared_ptr<double> time;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      time = std::make_shared<double>(0);
      submit([time, id = s.id()] { *time = streams[id].busy_ms; }, s.id());
    }
    mark = mark_of(s.id());
    mark.time_ms = time;
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) let_wait(*static_cast<Mark*>(event), s.id());
  }
  bool queryEvent(void* event) const override {
    bool done = !event || query(*static_cast<Mark*>(event));
    check();
    return done;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host(*static_cast<Mark*>(event), "wait", false);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto &a = *static_cast<Mark*>(first), &b = *static_cast<Mark*>(second);
    TORCH_CHECK(a.time_ms && b.time_ms, "an event was made without enable_timing");
    TORCH_CHECK(is_done(a) && is_done(b), "an event has not happened yet");
    return *b.time_ms - *a.time_ms;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    record_stream(p.get(), s.id());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Device getDeviceFromPtr(void*) const override { return {c10::kPrivateUse1, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = allocator.allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) allocator.copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_at);
  m.impl("record_stream", record_on);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("set_early", [](bool on) { synchronize_all(), early = on; });
  m.def("manual_seed", [](uint64_t seed) { default_generator.set_current_seed(seed); });
  m.def("generator", [] { return default_generator; });
  m.def("tasks_run", [] { return tasks_run; });
  m.def("waiting", [] {
    std::lock_guard guard(lock);
    uint64_t count = 0;
    for (auto& [id, stream] : streams) count += stream.given - stream.done;
    return count;
  });
  m.def("blocked", [] {
    std::lock_guard guard(lock);
    return blocked;
  });
  m.def("blocks", [] {
    std::lock_guard guard(lock);
    return blocks.size();
  });
  m.def("forgive", [] {
    std::lock_guard guard(lock);
    return std::exchange(failure, "");
  });
  m.def("on_blocked", [](py::object told) {
    if (told.is_none()) {
      on_blocked = nullptr;
      return;
    }
    auto kept = new py::object(told);  // for as long as the process lives
    on_blocked = [kept](const std::string& way) {
      py::gil_scoped_acquire gil;
      (*kept)(way);
    };
  });
}
