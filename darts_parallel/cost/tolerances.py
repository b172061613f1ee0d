"""Relative tolerances of seconds and of bytes, and the contract between them.

Sums of the same float64 numbers in another order differ by about 1e-16 a term. Every tolerance is
above this error and far below any difference that a user could measure. From the smallest to the
largest:

1. `INCUMBENT_TOLERANCE`: a partial plan is compared with the seconds of the best plan. Both sums
   have the same order, so only their last digits differ.
2. `LABEL_TOLERANCE`: two labels of a dynamic programme are equal. Labels are sums of at most some
   hundred layers. It is below the next ones: labels that count as equal do not decide whether a
   plan fits.
3. `SOLVER_MEMORY_TOLERANCE`: a solver compares bytes with a capacity. Solvers add bytes by prefix
   sums or by differences. `BOUND_TOLERANCE` and `GAIN_TOLERANCE` are as large: they compare such
   sums of seconds.
4. `PLAN_MEMORY_TOLERANCE`: a finished plan's bytes are compared with a capacity. It is larger than
   the solvers' tolerance, so that a plan that a solver accepts still fits when it is priced in
   another order.
5. `COST_TOLERANCE`: two costs in seconds are the same. It is far above all others: a plan may lie
   below a lower bound by rounding alone, and an outer choice is excluded only if its bound is
   clearly worse.
"""

INCUMBENT_TOLERANCE = 1e-14
"""Relative; the seconds of a partial plan may exceed the incumbent's by this much."""
LABEL_TOLERANCE = 1e-13
"""Relative; entries of labels that differ by less are equal."""
SOLVER_MEMORY_TOLERANCE = 1e-12
"""Relative; the bytes that a solver has added up may exceed a capacity by this much."""
BOUND_TOLERANCE = 1e-12
"""Relative; lower bounds are reduced by this much, so that rounding cannot lift one above a true
cost."""
GAIN_TOLERANCE = 1e-12
"""Relative; a plan is faster than another one only if it saves more than this much."""
PLAN_MEMORY_TOLERANCE = 4e-12
"""Relative; the bytes of a priced plan may exceed a capacity by this much."""
COST_TOLERANCE = 1e-9
"""Relative; two costs in seconds that differ by less are the same."""
