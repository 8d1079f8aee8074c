// The simulated device's operations: each is queued, and computed by torch's own kernel for the CPU when its turn comes.
//
// What comes out has its shape from torch's meta kernels, at once. Where a shape or a number depends on the data
// (nonzero, item), the host waits, and that is counted. A division by a number from the host is a multiplication by
// its reciprocal, as CUDA does it.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "generator.h"
#include "memory.h"

namespace simulated {

// What a task knows of a tensor: it must not keep its memory alive.
struct View {
  char* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().is_privateuseone(); }

inline View view_of(const at::Tensor& t) {
  TORCH_CHECK(!t.is_conj() && !t.is_neg(), "simulated device: resolve_conj() or resolve_neg() first");
  auto data = static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
  if (on_device(t) && t.numel()) note_use(data);
  return {data, t.sizes().vec(), t.strides().vec(), t.scalar_type()};
}

inline at::Tensor from(char* data, const View& v) {
  auto options = at::TensorOptions().dtype(v.dtype);
  if (!data) return at::empty_strided(v.sizes, v.strides, options);
  return at::from_blob(data, v.sizes, v.strides, options);
}

inline at::Tensor in_task(const View& v) {
  bool empty = std::find(v.sizes.begin(), v.sizes.end(), 0) != v.sizes.end();
  return from(empty ? nullptr : shadow(v.data), v);
}

// Tasks know nothing of the thread in which they run.
inline Task plainly(Task task) {
  return [task = std::move(task)] {
    c10::impl::ExcludeDispatchKeyGuard guard(
        c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::Python));
    at::InferenceMode normal(false);
    task();
  };
}

inline Mark give(Task task) {
  check();
  return submit(plainly(std::move(task)));
}

// ---- memory

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor like(const at::Tensor& t) { return empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {}); }

inline void note_pinned(const void* pointer, const Mark& mark) {
  std::lock_guard guard(lock);
  if (auto found = pinned_of(pointer)) found->users.push_back(mark);
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  View a = view_of(source), b = view_of(target);
  if (on_device(source) && on_device(target)) {
    give([=] { in_task(b).copy_(in_task(a)); });
  } else if (on_device(target)) {
    if (non_blocking && is_pinned(a.data)) {  // read when its turn comes
      note_pinned(a.data, give([=] { in_task(b).copy_(from(a.data, a)); }));
    } else {
      auto staged = source.contiguous().clone();
      wait_on_host(give([=] { in_task(b).copy_(staged); }), "up");
    }
  } else {
    bool later = non_blocking && is_pinned(b.data);
    Mark mark = give([=] { from(b.data, b).copy_(in_task(a)); });
    if (later) note_pinned(b.data, mark);
    else wait_on_host(mark, "down");
  }
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

inline at::Scalar item(const at::Tensor& t) {
  at::Scalar found;
  View v = view_of(t);
  wait_on_host(give([&] { found = in_task(v).item(); }), "down");
  return found;
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> f) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), f);
}
inline at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
inline at::Tensor& set_at(at::Tensor& self, at::Storage s, int64_t at, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, s, at, size, stride);
}

// ---- with kernels of their own

inline void record_on(at::Tensor& tensor, at::Stream stream) {
  record_stream(tensor.storage().data_ptr().get(), stream.id());
}

inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(at::kBool));
  bool drops = train.value_or(true);
  auto generator = static_cast<Generator*>(default_generator.unsafeGetGeneratorImpl())->draw();
  View a = view_of(input), b = view_of(output), m = view_of(mask);
  give([=] {
    auto kept = in_task(m);
    drops ? kept.bernoulli_(1 - p, generator) : kept.fill_(true);
    in_task(b).copy_(in_task(a) * kept * (!drops ? 1.0 : p < 1 ? 1 / (1 - p) : 0.0));
  });
  return {output, mask};
}

inline at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef more, int64_t groups) {
  auto sizes = transposed
      ? at::native::conv_input_size(input.sizes(), weight.sizes(), padding, more, stride, dilation, groups)
      : at::native::conv_output_size(input.sizes(), weight.sizes(), padding, stride, dilation);
  auto output = at::empty(sizes, input.options());
  bool biased = bias && bias->defined();
  View a = view_of(input), w = view_of(weight), c = biased ? view_of(*bias) : View{}, b = view_of(output);
  give([=, s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = more.vec()] {
    auto with = biased ? std::optional(in_task(c)) : std::nullopt;
    in_task(b).copy_(at::convolution(in_task(a), in_task(w), with, s, p, d, transposed, o, groups));
  });
  return output;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef more, int64_t groups,
    std::array<bool, 3> mask) {
  int64_t channels = grad.size(1);
  at::Tensor outs[3];
  if (mask[0]) outs[0] = at::empty_like(input);
  if (mask[1]) outs[1] = at::empty_like(weight);
  if (mask[2]) outs[2] = at::empty({channels}, grad.options());
  std::vector<View> results;
  for (auto& out : outs) results.push_back(out.defined() ? view_of(out) : View{});
  View g = view_of(grad), a = view_of(input), w = view_of(weight);
  give([=, s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = more.vec()] {
    auto sizes = mask[2] ? std::optional(std::vector<int64_t>{channels}) : std::nullopt;
    auto found = at::convolution_backward(
        in_task(g), in_task(a), in_task(w), sizes ? at::OptionalIntArrayRef(*sizes) : std::nullopt, s, p, d, transposed,
        o, groups, mask);
    if (mask[0]) in_task(results[0]).copy_(std::get<0>(found));
    if (mask[1]) in_task(results[1]).copy_(std::get<1>(found));
    if (mask[2]) in_task(results[2]).copy_(std::get<2>(found));
  });
  return {outs[0], outs[1], outs[2]};
}

// ---- all the others

// A value with each tensor in it replaced.
inline c10::IValue changed(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorList()) out.push_back(change(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (std::optional<at::Tensor> t : value.toOptionalTensorList())
      out.push_back(t && t->defined() ? std::optional(change(*t)) : t);
    return out;
  }
  return value;
}

struct Call {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;  // a meta tensor stands for one of the device
  std::vector<View> views;
  bool by_reciprocal = false;

  void operator()(torch::jit::Stack& stack) const {
    size_t next = 0;
    for (auto& argument : arguments)
      stack.push_back(changed(argument, [&](auto& t) { return t.is_meta() ? in_task(views[next++]) : t; }));
    if (!by_reciprocal) return op.callBoxed(&stack);
    auto divisor = stack[1].toTensor();
    stack[1] = c10::scalar_to_tensor(divisor.to(at::kFloat).reciprocal().item());
    stack[1].toTensor().unsafeGetTensorImpl()->set_wrapped_number(true);
    c10::Dispatcher::singleton().findSchemaOrThrow("aten::mul", op.schema().overload_name().c_str()).callBoxed(&stack);
  }
};

inline Call call_of(const c10::OperatorHandle& op, std::vector<c10::IValue>& args) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  Call call{op, {}, {}};
  auto keep = [&](const at::Tensor& t) -> at::Tensor {
    if (on_device(t)) {
      call.views.push_back(view_of(t));
      return at::empty({0}, at::TensorOptions().device(at::kMeta));
    }
    TORCH_CHECK(
        t.dim() == 0 || name.find("index") != std::string::npos, "Expected all tensors to be on the same device, but ",
        name, " got one on the simulated device and one on ", t.device());
    return t.clone();
  };
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    call.arguments.push_back(changed(args[i], keep));
    if (argument.name() == "device" && !args[i].isNone()) call.arguments.back() = c10::Device(c10::kCPU);
    if (argument.type()->str().find("Generator") != std::string::npos) {
      auto given = args[i].isNone() ? default_generator : args[i].toGenerator();
      call.arguments.back() = at::check_generator<Generator>(given)->draw();
    }
  }
  bool halves = name == "aten::div" && schema.overload_name().find("mode") == std::string::npos && args[1].isTensor();
  call.by_reciprocal = halves && !on_device(args[1].toTensor()) && at::isFloatingType(args[0].toTensor().scalar_type()) &&
      args[0].toTensor().scalar_type() != at::kDouble;
  return call;
}

// What comes out, still empty; false: nobody can know before it is computed.
inline bool prepare(const c10::OperatorHandle& op, std::vector<c10::IValue>& args, torch::jit::Stack& outs) {
  const auto& schema = op.schema();
  for (auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
  }
  bool shaped = op.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  if (!shaped || op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return false;
  torch::jit::Stack metas;
  auto meta = [](const at::Tensor& t) {
    return on_device(t) ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
  };
  for (size_t i = 0; i < args.size(); ++i) {
    metas.push_back(changed(args[i], meta));
    if (schema.arguments()[i].name() == "device" && !args[i].isNone()) metas.back() = c10::Device(c10::kMeta);
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) metas.back() = c10::IValue();
  }
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset);
  op.callBoxed(&metas);
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    const auto* alias = schema.returns()[r].alias_info();
    if (!alias || !alias->isWrite()) {
      outs.push_back(changed(metas[r], like));
      continue;
    }
    for (size_t i = 0; i < args.size(); ++i) {
      const auto* mine = schema.arguments()[i].alias_info();
      if (!mine || !mine->isWrite() || mine->beforeSets() != alias->beforeSets()) continue;
      if (args[i].isTensor() && args[i].toTensor().sizes() != metas[r].toTensor().sizes())
        at::native::resize_output(args[i].toTensor(), metas[r].toTensor().sizes());
      outs.push_back(args[i]);
    }
  }
  return true;
}

inline void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto args = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::Stack outs;
  if (prepare(op, args, outs)) {
    auto call = std::make_shared<Call>(call_of(op, args));
    std::vector<std::vector<View>> results(outs.size());
    for (size_t r = 0; r < outs.size(); ++r) {
      const auto* alias = schema.returns()[r].alias_info();
      if (alias && alias->isWrite()) continue;
      changed(outs[r], [&](const at::Tensor& t) { return results[r].push_back(view_of(t)), t; });
    }
    give([call, results] {
      torch::jit::Stack found;
      (*call)(found);
      for (size_t r = 0; r < results.size(); ++r) {
        size_t next = 0;
        if (results[r].empty()) continue;
        changed(found[r], [&](const at::Tensor& t) {
          auto out = in_task(results[r][next++]);
          if (t.numel() || !out.numel()) out.copy_(t);  // or it is one that the CPU leaves out
          return t;
        });
      }
    });
  } else {
    torch::jit::Stack found;
    Call call = call_of(op, args);
    wait_on_host(give([&] { call(found); }), "down");
    for (auto& value : found) {
      outs.push_back(changed(value, [](const at::Tensor& t) {
        auto out = like(t);
        View b = view_of(out);
        give([=] { in_task(b).copy_(t); });
        return out;
      }));
    }
  }
  torch::jit::drop(*stack, args.size());
  for (auto& out : outs) stack->push_back(out);
}

}  // namespace simulated
