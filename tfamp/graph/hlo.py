"""Reads the products and convolutions of a program that XLA compiled."""

import dataclasses
import re

_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "s8": "int8",
    "s32": "int32",
}
# "%name = f32[4,32]{1,0} dot(%a, %b), ..."; a call may return a tuple.
_DEFINITION = re.compile(
    r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+) = "
    r"(?P<tuple>\()?(?P<dtype>[a-z]+\d*\w*)\[(?P<shape>[^\]]*)\]"
)
_PRODUCT = re.compile(r"\s(?P<kind>dot|convolution|custom-call)\((?P<operands>[^)]*)\)")
_TARGET = re.compile(r'custom_call_target="(?P<target>[^"]*)"')
# Library calls that stand for a product: cuBLAS, cuDNN, oneDNN, Eigen.
_LIBRARY = re.compile(r"gemm|matmul|conv|dot", re.IGNORECASE)
_OP_NAME = re.compile(r'op_name="(?P<op_name>[^"]*)"')


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """A matrix product or convolution as the compiled program runs it.

    Args:
        name: Its name in the program.
        kind: "dot", "convolution", or the library function that is called.
        op_name: The operation of the graph that it comes from, "" where XLA made
            it anew and kept no name.
        dtypes: Dtypes of the two factors.
        output_shape: Shape of what it gives.
    """

    name: str
    kind: str
    op_name: str
    dtypes: tuple[str, ...]
    output_shape: tuple[int, ...]


def read_hlo(text: str) -> tuple[CompiledProduct, ...]:
    """Returns the products and convolutions of a compiled program.

    Args:
        text: What `experimental_get_compiler_ir` gives at stage "optimized_hlo".

    Example:
        >>> text = '''
        ...   %a = bf16[2,3]{1,0} parameter(0)
        ...   %b = f32[3,4]{1,0} parameter(1)
        ...   ROOT %c = f32[2,4]{1,0} dot(%a, %b), metadata={op_name="dense/MatMul"}
        ... '''
        >>> product, = read_hlo(text)
        >>> product.op_name, product.dtypes, product.output_shape
        ('dense/MatMul', ('bfloat16', 'float32'), (2, 4))
    """
    dtypes: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        if found := _DEFINITION.match(line):
            dtypes[found["name"]] = _DTYPES.get(found["dtype"], found["dtype"])
            lines.append((found, line))
    products = []
    for found, line in lines:
        call = _PRODUCT.search(line, found.end())
        if call is None:
            continue
        kind = call["kind"]
        if kind == "custom-call":
            target = _TARGET.search(line)
            kind = target["target"] if target else ""
            if not _LIBRARY.search(kind):
                continue
        operands = operands_of(call["operands"])[:2]
        op_name = _OP_NAME.search(line)
        products.append(
            CompiledProduct(
                found["name"],
                kind,
                op_name["op_name"] if op_name else "",
                tuple(dtypes.get(each, "") for each in operands),
                tuple(map(int, re.findall(r"\d+", found["shape"]))),
            )
        )
    return tuple(products)


def operands_of(text: str) -> list[str]:
    """Returns the names in "%a, %b", or in "f32[2,3]{1,0} %a, f32[3]{0} %b"."""
    if "%" in text:
        return re.findall(r"%([\w.\-]+)", text)
    return [each.split()[-1] for each in text.split(",") if each.strip()]
