// PyTorch's operators of CUDA tensors, computed by the CPU's kernels on the same memory.
//
// Device memory is main memory (runtime.cpp), so a CUDA tensor can be looked at as a CPU tensor.
// Every aten operator with a kernel for CUDA gets another one, which looks at its tensors so, asks
// the dispatcher again and hands what is new to the device. Views, allocations and what speaks to
// streams stay as they are. What would have the CPU wait for a GPU is told as CUDA's own tells it:
// see torch.cuda.set_sync_debug_mode.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/library.h>

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

using at::Tensor;
using c10::DispatchKey;
using Looks = std::unordered_map<const void*, std::pair<Tensor, Tensor>>;  // of: look, original

namespace {

const std::set<std::string> KEPT = {
    "aten::_pin_memory", "aten::is_pinned", "aten::record_stream", "aten::_local_scalar_dense",
    "aten::set_",        "aten::resize_",   "aten::empty",         "aten::empty_strided",
    "aten::new_empty_strided",
};

// They have no kernel of CUDA's own: a composite one asks for a library's, which the CPU has not.
const std::set<std::string> CHOOSING = {"aten::convolution"};

// How large their results are, or what they answer, is read from the device.
const std::set<std::string> WAITED_FOR = {
    "aten::nonzero",      "aten::masked_select",      "aten::equal",   "aten::_unique",
    "aten::_unique2",     "aten::unique_consecutive", "aten::bincount", "aten::unique_dim",
    "aten::unique_dim_consecutive",
};

// Below autograd, autocast and what counts versions.
struct Below {
    c10::impl::ExcludeDispatchKeyGuard guard{
        c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet(DispatchKey::ADInplaceOrView)};
};

Tensor look_at(const Tensor& tensor) {
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (!tensor.data_ptr()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor lowered(const Tensor& tensor, Looks& looks) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    Tensor look = look_at(tensor);
    looks[look.unsafeGetTensorImpl()] = {look, tensor};
    return look;
}

Tensor lifted(const Tensor& tensor, const Looks& looks) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    auto found = looks.find(tensor.unsafeGetTensorImpl());
    if (found != looks.end()) return found->second.second;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCUDA, 0);
    Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    look_at(made).copy_(tensor);
    return made;
}

template <class F>
void each_tensor(c10::IValue& value, F&& function) {
    if (value.isTensor()) {
        value = function(value.toTensor());
    } else if (value.isTensorList()) {
        c10::List<Tensor> made;
        for (const Tensor& tensor : value.toTensorVector()) made.push_back(function(tensor));
        value = made;
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> made;
        for (const auto& tensor : value.toOptionalTensorVector())
            made.push_back(tensor ? std::optional(function(*tensor)) : tensor);
        value = made;
    }
}

void cpu_waits() {
    if (c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_DISABLED)
        c10::cuda::warn_or_error_on_sync();
}

bool is_mask(const std::optional<Tensor>& tensor) {
    return tensor && tensor->defined() && tensor->is_cuda() &&
           (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
}

// Does CUDA's kernel read from the device how many there are: of a mask, or to repeat?
bool has_cpu_wait(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> given) {
    if (WAITED_FOR.count(schema.name())) return true;
    if (schema.name() == "aten::repeat_interleave") return given.back().isNone();
    for (const auto& value : given)
        if (value.isOptionalTensorList())
            for (const auto& tensor : value.toOptionalTensorVector())
                if (is_mask(tensor)) return true;
    return false;
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    Looks looks;
    auto count = op.schema().arguments().size();
    if (has_cpu_wait(op.schema(), torch::jit::last(*stack, count))) cpu_waits();
    for (auto place = stack->size() - count; place < stack->size(); ++place) {
        auto& value = (*stack)[place];
        each_tensor(value, [&](const Tensor& tensor) { return lowered(tensor, looks); });
        if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(at::kCPU);
        if (value.isGenerator()) value = c10::IValue();
    }
    {
        Below below;
        op.callBoxed(*stack);
    }
    for (auto& [_, both] : looks)  // an `out` that was made larger
        if (both.second.sizes() != both.first.sizes()) {
            both.second.resize_(both.first.sizes());
            look_at(both.second).copy_(both.first);
        }
    for (auto& value : *stack)
        each_tensor(value, [&](const Tensor& tensor) { return lifted(tensor, looks); });
}

// PyTorch tells of copies that are not asked to go on beside the CPU. Those of memory that is not
// locked have it wait as well.
Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
    const Tensor& on_host = target.is_cuda() ? source : target;
    if (target.is_cuda() != source.is_cuda() && target.numel() &&
        !(non_blocking && on_host.is_pinned()))
        cpu_waits();
    Below below;
    Tensor to = target.is_cuda() ? look_at(target) : target;
    to.copy_(source.is_cuda() ? look_at(source) : source);
    return target;
}

bool is_view(const c10::FunctionSchema& schema) {
    for (const auto& result : schema.returns())
        if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
}

bool is_computed(const c10::OperatorHandle& op, const c10::OperatorName& name) {
    if (name.name.rfind("aten::", 0) != 0 || KEPT.count(name.name)) return false;
    bool is_cudas = op.hasKernelForDispatchKey(DispatchKey::CUDA) || CHOOSING.count(name.name);
    if (!is_cudas || is_view(op.schema())) return false;
    for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd,
                     DispatchKey::CompositeImplicitAutograd,
                     DispatchKey::CompositeExplicitAutogradNonFunctional})
        if (op.hasKernelForDispatchKey(key)) return true;
    return false;
}

}  // namespace

// The number of operators that are computed here from now on.
extern "C" int standin_install() {
    static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__,
                                  __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    int count = 0;
    for (const auto& name : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findSchema(name);
        if (!op || !is_computed(*op, name)) continue;
        auto full = name.name.substr(std::string("aten::").size());
        if (!name.overload_name.empty()) full += "." + name.overload_name;
        library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
        ++count;
    }
    library.impl("copy_", TORCH_FN(copy_));
    return count;
}
