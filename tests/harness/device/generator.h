// The device's own generator: a seed and a count of draws. What a draw gives is decided where it is asked for, so that
// it does not depend on when the task runs. Not the CPU's numbers, for the same seed.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include "streams.h"

namespace simulated {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl({c10::kPrivateUse1, 0}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), seed_(seed) {}
  static c10::DeviceType device_type() { return c10::kPrivateUse1; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, draws_ = 0; }
  void set_offset(uint64_t offset) override { draws_ = offset; }
  uint64_t get_offset() const override { return draws_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof(uint64_t) * 2, "this is no state of the simulated device's generator");
    auto words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], draws_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({int64_t(sizeof(uint64_t) * 2)}, at::kByte);
    auto words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = draws_;
    return state.getIntrusivePtr();
  }
  // Numbers for one operation.
  at::Generator draw() {
    std::lock_guard guard(mutex_);
    uint64_t mixed = seed_ + 0x9E3779B97F4A7C15ull * ++draws_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }

 private:
  Generator* clone_impl() const override {
    auto twin = new Generator(seed_);
    twin->draws_ = draws_;
    return twin;
  }
  uint64_t seed_, draws_ = 0;
};

inline at::Generator default_generator = at::make_generator<Generator>();

}  // namespace simulated
