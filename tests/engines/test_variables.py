# SPDX-License-Identifier: Apache-2.0
"""Test variables of libraries below an engine: which of them count, and how both engines treat them."""

from __future__ import annotations

import pytest

from kvoffload.engines.sglang.identity import environment_of
from kvoffload.engines.variables import HARMLESS, PREFIXES, counted
from kvoffload.engines.vllm.environment import environment

COUNTING = """
NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE
CUBLAS_EMULATE_SINGLE_PRECISION CUBLASLT_INVENTED CUDNN_INVENTED MKL_INVENTED TRITON_F32_DEFAULT
TORCHINDUCTOR_EMULATE_PRECISION_CASTS TORCHINDUCTOR_USE_FAST_MATH AITER_BF16_FP8_MOE_BOUND ROCBLAS_DEFAULT_ATOMICS_MODE
FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH FLA_TRIL_PRECISION TRTLLM_DISABLE_FP4_QUANT_FAST_MATH DG_INVENTED CK_MOE_INVENTED
"""
SILENT = """
TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MKL_NUM_THREADS ONEDNN_VERBOSE CUBLAS_WORKSPACE_CONFIG OMP_NUM_THREADS PATH
TRITON_SERVICE_HOST TRITON_INFER_PORT_8000_TCP_ADDR NVIDIA_VISIBLE_DEVICES TORCH_HOME
"""


def test_no_harmless_name_is_in_vain() -> None:
    names = [name for row in HARMLESS.values() for name in row.split()]
    assert len(names) == len(set(names))
    assert [name for name in names if not name.startswith(PREFIXES)] == []


@pytest.mark.parametrize("name", COUNTING.split())
def test_a_variable_that_may_change_numbers_counts_in_both_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(), environment_of({})
    monkeypatch.setenv(name, "1")
    assert counted([name, "PATH"]) == [name]
    assert environment() != before[0]
    assert environment_of({name: "1"}) != before[1]


@pytest.mark.parametrize("name", SILENT.split())
def test_other_variables_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment()
    monkeypatch.setenv(name, "1")
    assert counted([name]) == []
    assert environment() == before
    assert environment_of({name: "1"}) == {}
