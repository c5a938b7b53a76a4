"""Names of the placeholders through which a graph gets the loss scale."""

FACTORS, OVERFLOW = "fp8_loss_factors", "fp8_loss_overflow"  # [2] and [1], fp32
SCALE, INVERSE = 0, 1  # in FACTORS
