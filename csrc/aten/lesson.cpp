/*
 * Nothing here is shared: a lesson is made of one finished call.
 */
#include "lesson.h"

#include <c10/util/accumulate.h>

#include <string_view>
#include <unordered_set>

#include "tensor_components.h"

namespace torch_openreg {

namespace {

using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;

/* Arguments are as they were, but for outputs that the call gave a size, which are noted: they hold nothing that is
 * read, as what is written in place may. */
bool unchanged(const OpTraits &traits, Arguments arguments,
               const std::vector<TensorMetadata> &before, std::vector<Resize> &resizes) {
  const bool inPlace = std::string_view(traits.name).back() == '_';
  auto layout = before.begin();
  bool same = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    eachTensor(arguments[i], [&](const at::Tensor &tensor) {
      const TensorMetadata &old = *layout++;
      if (old.describes(tensor)) return;
      const bool sized = traits.isWritten[i] && arguments[i].isTensor() && tensor.defined() &&
                         (!inPlace || c10::multiply_integers(old.sizes()) == 0) &&
                         old.dtype == tensor.scalar_type() && old.conj == tensor.is_conj() &&
                         old.neg == tensor.is_neg();
      if (sized) resizes.push_back({i, TensorMetadata(tensor)});
      same &= sized;
    });
  }
  return same;
}

bool ownsItsStorage(const at::Tensor &tensor, Arguments arguments,
                    std::unordered_set<const void *> &storages) {
  if (!tensor.defined()) return true;
  if (!isPlain(tensor) || !tensor.has_storage() || tensor.storage_offset() != 0 ||
      tensor.storage().nbytes() < TensorMetadata(tensor).bytes) {
    return false;
  }
  bool shared = !storages.insert(tensor.storage().unsafeGetStorageImpl()).second;
  for (const IValue &value : arguments) {
    eachTensor(value, [&](const at::Tensor &argument) {
      shared |= argument.defined() && argument.is_alias_of(tensor);
    });
  }
  return !shared;
}

int argumentThatIs(const IValue &result, const OpTraits &traits, Arguments arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.isWritten[i] && result.isTensor() && arguments[i].isTensor() &&
        result.toTensor().is_same(arguments[i].toTensor())) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace

std::vector<TensorMetadata> metadataOf(c10::ArrayRef<IValue> arguments) {
  std::vector<TensorMetadata> layouts;
  for (const IValue &value : arguments) {
    eachTensor(value, [&](const at::Tensor &tensor) { layouts.emplace_back(tensor); });
  }
  return layouts;
}

std::shared_ptr<OutputSpec> describeOutputs(const OpTraits &traits, Arguments arguments,
                                            const std::vector<TensorMetadata> &before,
                                            c10::ArrayRef<IValue> results) {
  auto spec = std::make_shared<OutputSpec>();
  std::unordered_set<const void *> storages;
  spec->usable = unchanged(traits, arguments, before, spec->resizes);
  for (const IValue &value : results) {
    ResultSpec result;
    result.argument = argumentThatIs(value, traits, arguments);
    result.isList = !value.isTensor();
    if (result.argument < 0) {
      eachTensor(value, [&](const at::Tensor &tensor) {
        if (!ownsItsStorage(tensor, arguments, storages)) {
          spec->usable = false;
        } else {
          result.fresh.emplace_back(tensor);
        }
      });
    }
    spec->results.push_back(std::move(result));
  }
  return spec;
}

}  // namespace torch_openreg
