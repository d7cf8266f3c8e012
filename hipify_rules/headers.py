"""What the headers of one side say: every type, constant and function, as facts that two sides can be compared by.

`python -m hipify_rules.headers cuda|hip` writes them to facts/cuda.json and facts/hip.json. It parses real headers with
libclang (pip install libclang); what the compilers themselves make of the facts is for tests/test_gpu_names.py to see.

A fact is one of
    {"is": "integer" | "enum" | "float" | "pointer" | "record" | "union" | "function" | "opaque", "size", "align",
     "signed", "fields": {name: [byte offset, type]}, "to": what a typedef stands for}
    {"is": "constant", "value", "enum": its type}   an enumerator; a macro that is a number has no type
    {"is": "call", "result", "parameters", "optional": parameters at the end with a default, "deprecated": true,
     "overloads": as below, where there are templates of that name too}
    {"is": "template", "parameters": [the fewest, the most] of its overloads}
    {"is": "spelling", "of": the name that a macro stands for}
Types of parameters are written base first: `CUstream *`, `void const *`; sizes and offsets are bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("facts")
Fact = dict[str, Any]

HEADERS = {
    "cuda": ["cuda.h", "cuda_runtime.h", "cuda_profiler_api.h", "cuComplex.h", "cuda_fp8.h", "cuda_bf16.h", "nccl.h"],
    "hip": ["hip/hip_runtime.h", "hip/hip_complex.h", "hip/hip_fp8.h", "hip/hip_bf16.h", "rccl/rccl.h"],
}
NAME = {
    "cuda": re.compile(r"(?:cuda|CUDA_|cu[A-Z]|CU[a-z_]|CUGPU|make_cu|nccl|NCCL|pnccl|__nv_|__NV_|libraryProp)\w*"),
    "hip": re.compile(r"(?:hip|HIP_|HIP[a-z]|__hip_|__HIP_(?!ARCH_)|ihip|make_hip|nccl|NCCL|pnccl)\w*"),
}
VECTOR = re.compile(r"(?:u?(?:char|short|int|long|longlong)|float|double)[1-4]|dim3")
# Numbers that say which release this is, or what it was built for, and not what something is.
RELEASE = re.compile(
    r"\w*(?:_VERSION\w*|_VERSION|_MAJOR|_MINOR|_PATCH|_SUFFIX|_H|_H_|_VERSIONED_VALUE\w*)$|HIP_INCLUDE_\w*"
)


def dump(side: str, folders: list[str]) -> dict[str, Fact]:
    """The facts of all names of `side` ("cuda" or "hip") in its headers, which are found in `folders`."""
    from clang import cindex

    compilers = subprocess.run(["g++", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout
    arguments = ["-x", "c++", "-std=c++17", "-isystem", compilers.strip(), "-D__HIP_PLATFORM_AMD__"]
    arguments += [f"-I{folder}" for folder in folders]
    # Of what is installed on its own; everything else has to be there.
    optional = {"nccl.h", "rccl/rccl.h"}
    lines = [f"#include <{name}>" for name in HEADERS[side]]
    lines = [
        f"#if __has_include(<{line[10:-1]}>)\n{line}\n#endif" if line[10:-1] in optional else line for line in lines
    ]
    text = "\n".join(lines) + "\n"
    options = (
        cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD | cindex.TranslationUnit.PARSE_SKIP_FUNCTION_BODIES
    )
    unit = cindex.Index.create().parse("facts.cc", arguments, unsaved_files=[("facts.cc", text)], options=options)
    errors = [str(said) for said in unit.diagnostics if said.severity >= cindex.Diagnostic.Error]
    if errors:
        raise SystemExit("\n".join(errors))
    facts: dict[str, Fact] = {}
    macros: dict[str, str] = {}
    for cursor in _declarations(unit.cursor):
        name = cursor.spelling
        if not NAME[side].fullmatch(name):
            continue
        if cursor.kind.name == "MACRO_DEFINITION":
            macros[name] = " ".join(token.spelling for token in list(cursor.get_tokens())[1:])
        else:
            _add(facts, name, _fact(cursor))
    for name, body in macros.items():
        if (found := _macro(name, body, facts, macros)) is not None:
            facts[name] = found
    return {name: facts[name] for name in sorted(facts)}


def _declarations(cursor: Any) -> Iterator[Any]:
    """Everything named at the top level, inside extern "C" and inside enums."""
    wanted = {
        "STRUCT_DECL",
        "UNION_DECL",
        "CLASS_DECL",
        "ENUM_DECL",
        "ENUM_CONSTANT_DECL",
        "TYPEDEF_DECL",
        "TYPE_ALIAS_DECL",
    }
    wanted |= {"FUNCTION_DECL", "FUNCTION_TEMPLATE", "MACRO_DEFINITION"}
    for child in cursor.get_children():
        if child.kind.name in wanted:
            yield child
        if child.kind.name in ("LINKAGE_SPEC", "UNEXPOSED_DECL", "ENUM_DECL"):
            yield from _declarations(child)


def _add(facts: dict[str, Fact], name: str, fact: Fact) -> None:
    """Adds a fact; of two about one name the more telling stays, and overloads of a template become one."""
    old = facts.get(name)
    if old is None or old["is"] == "opaque":
        facts[name] = fact
    elif old["is"] == fact["is"] == "template":
        fewest, most = zip(old["parameters"], fact["parameters"], strict=True)
        old["parameters"] = [min(fewest), max(most)]
    elif {old["is"], fact["is"]} == {"template", "call"}:
        template, call = (old, fact) if old["is"] == "template" else (fact, old)
        counts: list[int] = template["parameters"]
        fewest, most = zip(counts, call.get("overloads", counts), strict=True)
        facts[name] = {**call, "overloads": [min(fewest), max(most)]}


def _fact(cursor: Any) -> Fact:
    kind = cursor.kind.name
    if kind == "ENUM_CONSTANT_DECL":
        fact: Fact = {"is": "constant", "value": cursor.enum_value}
        of = cursor.semantic_parent.spelling
        return {**fact, "enum": of} if of.isidentifier() else fact
    if kind == "FUNCTION_TEMPLATE":
        parameters = [child for child in cursor.get_children() if child.kind.name == "PARM_DECL"]
        return {"is": "template", "parameters": [len(parameters) - _optional(parameters), len(parameters)]}
    if kind == "FUNCTION_DECL":
        parameters = list(cursor.get_arguments())
        fact = {"is": "call", "result": written(cursor.result_type)}
        fact["parameters"] = [written(parameter.type) for parameter in parameters]
        if optional := _optional(parameters):
            fact["optional"] = optional
        if cursor.availability.name == "DEPRECATED":
            fact["deprecated"] = True
        return fact
    fact = _layout(cursor.type.get_canonical())
    if kind in ("TYPEDEF_DECL", "TYPE_ALIAS_DECL"):
        fact["to"] = written(cursor.underlying_typedef_type)
    return fact


def _optional(parameters: list[Any]) -> int:
    return sum(bool({"=", "__dparm"} & {token.spelling for token in one.get_tokens()}) for one in parameters)


def _layout(type_: Any) -> Fact:
    """The facts of a type itself."""
    declared = type_.get_declaration()
    kind = type_.kind.name
    fact: Fact
    if kind == "RECORD":
        if type_.get_size() < 0:
            return {"is": "opaque"}
        shape = "union" if declared.kind.name == "UNION_DECL" else "record"
        fact = {"is": shape, "size": type_.get_size(), "align": type_.get_align()}
        own = any(one.fullmatch(declared.spelling) for one in NAME.values()) and declared.spelling != "HIP_vector_type"
        return {**fact, "fields": dict(_fields(type_))} if own else fact
    if kind == "FUNCTIONPROTO":
        return {"is": "function"}
    shape = {"POINTER": "pointer", "ENUM": "enum", "FLOAT": "float", "DOUBLE": "float"}.get(kind, "integer")
    fact = {"is": shape, "size": type_.get_size(), "align": type_.get_align()}
    if shape in ("integer", "enum"):
        counted = declared.enum_type.get_canonical() if shape == "enum" else type_
        fact["signed"] = counted.kind.name in ("CHAR_S", "SCHAR", "SHORT", "INT", "LONG", "LONGLONG")
    return fact


def _fields(type_: Any, before: str = "", at: int = 0) -> Iterator[tuple[str, list[Any]]]:
    """The public fields of a record, their offsets and types, and those of unnamed records inside it."""
    for field in type_.get_fields():
        if field.access_specifier.name not in ("PUBLIC", "INVALID"):
            continue
        named = field.spelling.isidentifier()  # else an unnamed record whose fields are the outer one's own
        path, offset = before + field.spelling if named else before, at + field.get_field_offsetof() // 8
        if named:
            yield path, [offset, written(field.type)]
        if field.type.get_declaration().is_anonymous():
            yield from _fields(field.type.get_canonical(), f"{path}." if named else before, offset)


def written(type_: Any) -> str:
    """A type, base first, with the library's own names kept and the language's reduced to what they are here."""
    const = " const" if type_.is_const_qualified() else ""
    kind = type_.kind.name
    if kind == "ELABORATED":
        return written(type_.get_named_type()) + const
    if kind in ("POINTER", "LVALUEREFERENCE"):
        return written(type_.get_pointee()) + (" *" if kind == "POINTER" else " &") + const
    if kind in ("CONSTANTARRAY", "INCOMPLETEARRAY"):
        return written(type_.element_type) + " *" if kind == "INCOMPLETEARRAY" else f"{written(type_.element_type)} []"
    if kind == "FUNCTIONPROTO":
        return f"{written(type_.get_result())} ({', '.join(written(one) for one in type_.argument_types())})"
    declared = type_.get_declaration()
    if kind == "TYPEDEF" and not any(one.fullmatch(declared.spelling) for one in (*NAME.values(), VECTOR)):
        return written(declared.underlying_typedef_type) + const
    name = declared.spelling or type_.spelling.removeprefix("const ")
    if "(unnamed" in name or "(anonymous" in name:
        return "unnamed" + const
    return re.sub(r"^(?:struct|union|enum|class) ", "", name) + const


def _macro(name: str, body: str, facts: dict[str, Fact], macros: dict[str, str]) -> Fact | None:
    """What an object-like macro stands for, if that is a number or another name."""
    body = re.sub(r"^__CUDA_API_PT(?:DS|SZ) ?\( ?(\w+) ?\)$", r"\1", body)  # the variant for the default stream in use
    if body != name and (body in facts or body in macros):
        return {"is": "spelling", "of": body}
    for _ in range(3):  # numbers that are named by other macros
        body = re.sub(r"[A-Za-z_]\w*", lambda found: macros.get(found[0], found[0]), body)
    number = re.sub(r"\( *(?:\w+ \*|[a-zA-Z_]\w*(?: [a-z]+)*) *\)|(?<=[0-9a-fA-F])[uUlL]+\b", "", body)
    if RELEASE.fullmatch(name) or not re.fullmatch(r"(?=.*\d)[-+~|<()\s0-9a-fA-FxX]+", number):
        return None
    try:
        return {"is": "constant", "value": int(eval(number, {"__builtins__": {}}))}
    except (SyntaxError, TypeError):
        return None


def release(side: str, folders: list[str]) -> str:
    """The release of `side` whose headers are in `folders`, like "7.2"."""
    for folder in map(Path, folders):
        if side == "cuda" and (header := folder / "cuda.h").exists():
            number = int(re.findall(r"#define CUDA_VERSION (\d+)", header.read_text())[0])
            return f"{number // 1000}.{number % 1000 // 10}"
        if side == "hip" and (header := folder / "hip" / "hip_version.h").exists():
            return ".".join(re.findall(r"#define HIP_VERSION_(?:MAJOR|MINOR) (\d+)", header.read_text()))
    raise SystemExit(f"no headers of {side} in {', '.join(folders)}")


def load(side: str) -> tuple[str, dict[str, Fact]]:
    """The release that the kept facts of `side` are from, and the facts."""
    kept = json.loads((FACTS / f"{side}.json").read_text())
    return kept["release"], kept["names"]


def text(release: str, facts: dict[str, Fact]) -> str:
    """Facts as they are kept: a line a name."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(fact)}" for name, fact in facts.items())
    return f'{{"release": {json.dumps(release)}, "names": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in HEADERS:
        raise SystemExit("python -m hipify_rules.headers cuda|hip INCLUDE_FOLDER...")
    side, *folders = sys.argv[1:]
    FACTS.mkdir(exist_ok=True)
    (FACTS / f"{side}.json").write_text(text(release(side, folders), dump(side, folders)))
