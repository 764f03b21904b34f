//! Kubernetes' `Quantity` as a number. This module does not know the unit of the number.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The finest step that a quantity has; sums of it are exact.
pub(crate) type Billionths = i128;

const UNIT: Billionths = 1_000_000_000;

/// The whole number that `quantity` is, if it is one and not negative.
#[must_use]
pub fn whole(quantity: &Quantity) -> Option<u64> {
    let billionths = billionths(&quantity.0)?;
    (billionths % UNIT == 0)
        .then(|| u64::try_from(billionths / UNIT).ok())
        .flatten()
}

/// `quantity` in units of `1 / per` (`per` divides a billion), rounded up; zero for an unreadable or negative quantity.
///
/// ```
/// use gpustow_api::quantity::rounded_up;
/// use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
///
/// let quantity = |text: &str| Quantity(text.to_owned());
/// assert_eq!(rounded_up(&quantity("648k"), 1), 648_000);
/// assert_eq!(rounded_up(&quantity("1500m"), 1), 2);
/// assert_eq!(rounded_up(&quantity("1500m"), 1000), 1500);
/// ```
pub fn rounded_up(quantity: &Quantity, per: i128) -> u64 {
    in_units(amount(quantity), per)
}

/// `quantity`; zero if it is unreadable or negative.
pub(crate) fn amount(quantity: &Quantity) -> Billionths {
    billionths(&quantity.0).unwrap_or(0).max(0)
}

/// `amount` in units of `1 / per` (`per` divides a billion), rounded up.
pub(crate) fn in_units(amount: Billionths, per: i128) -> u64 {
    let step = UNIT / per;
    u64::try_from(amount / step + i128::from(amount % step != 0)).unwrap_or(u64::MAX)
}

/// `text` times a billion, finer digits rounded up as Kubernetes does.
fn billionths(text: &str) -> Option<i128> {
    let text = text.trim();
    let (sign, text) = match text.as_bytes().first()? {
        b'-' => (-1, &text[1..]),
        b'+' => (1, &text[1..]),
        _ => (1, text),
    };
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let digits: i128 = match format!("{whole}{fraction}").trim_start_matches('0') {
        "" => 0,
        digits => digits.parse().ok()?,
    };
    let (binary, decimal) = scale(suffix)?;
    let shift = decimal
        .checked_add(9)?
        .checked_sub(i32::try_from(fraction.len()).ok()?)?;
    let scaled = digits.checked_mul(binary)?;
    let power = 10_i128.checked_pow(shift.unsigned_abs());
    let size = match power {
        _ if scaled == 0 => 0,
        Some(power) if shift >= 0 => scaled.checked_mul(power)?,
        Some(power) => scaled / power + i128::from(scaled % power != 0),
        None if shift >= 0 => return None,
        None => 1,
    };
    Some(sign * size)
}

/// The factor and the power of ten that a suffix stands for.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    Some(match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => (1, suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, expected) in [
            ("0", Some(0)),
            ("8192", Some(8192)),
            ("8Ki", Some(8192)),
            ("8k", Some(8000)),
            ("1e3", Some(1000)),
            ("1E3", Some(1000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("+1.5k", Some(1500)),
            ("0.5Ki", Some(512)),
            ("1000m", Some(1)),
            ("1.000", Some(1)),
            (".5", None),
            ("1500m", None),
            ("-1", None),
            ("", None),
            (".", None),
            ("-", None),
            ("1.2.3", None),
            ("Ki", None),
            ("8 Ki", None),
            ("8MiB", None),
            ("1e", None),
            ("1e400", None),
            ("1e-400", None),
            ("0e400", Some(0)),
            ("99999999999999999999999999999999999999999", None),
        ] {
            assert_eq!(whole(&Quantity(text.into())), expected, "{text:?}");
        }
    }

    #[test]
    fn rounding_is_up() {
        for (text, milli) in [
            ("1", 1000),
            ("250m", 250),
            ("0.0001", 1),
            ("2.5", 2500),
            ("x", 0),
            ("-3", 0),
        ] {
            assert_eq!(rounded_up(&Quantity(text.into()), 1000), milli, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn rubbish_does_not_panic(text in "[-+]?[0-9.]{0,45}([numkMGTPEKi]{0,3}|[eE][-+]?[0-9]{0,12}|\\PC{0,4})") {
            let quantity = Quantity(text);
            let _ = whole(&quantity);
            prop_assert!(rounded_up(&quantity, 1000) >= rounded_up(&quantity, 1));
        }
    }
}
