//! Label selectors as kubectl's `-l` takes them.

use kube::core::{Expression, Selector};

/// Reads `a=b,c!=d,e in (f,g),h,!i`.
///
/// # Errors
/// A sentence about the part that cannot be read.
pub(crate) fn parse(text: &str) -> Result<Selector, String> {
    let parts = split(text).into_iter().map(str::trim);
    parts
        .filter(|part| !part.is_empty())
        .map(expression)
        .collect()
}

/// At commas outside of parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    text.split(|letter| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    })
    .collect()
}

fn expression(part: &str) -> Result<Expression, String> {
    let key = |key: &str| match key.trim() {
        "" => Err(format!("{part:?} lacks a label")),
        key if key.contains(char::is_whitespace) => Err(format!(
            "{part:?}: write key=value, key in (a,b), key or !key"
        )),
        key => Ok(key.to_owned()),
    };
    let set = |list: &str| -> Result<_, String> {
        let list = list
            .trim()
            .strip_prefix('(')
            .and_then(|list| list.strip_suffix(')'));
        let list = list.ok_or_else(|| format!("{part:?}: write the values in parentheses"))?;
        Ok(list
            .split(',')
            .map(|value| value.trim().to_owned())
            .collect())
    };
    if let Some((name, value)) = part.split_once("!=") {
        Ok(Expression::NotEqual(key(name)?, value.trim().to_owned()))
    } else if let Some((name, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        Ok(Expression::Equal(key(name)?, value.trim().to_owned()))
    } else if let Some((name, list)) = part.split_once(" notin ") {
        Ok(Expression::NotIn(key(name)?, set(list)?))
    } else if let Some((name, list)) = part.split_once(" in ") {
        Ok(Expression::In(key(name)?, set(list)?))
    } else if let Some(name) = part.strip_prefix('!') {
        Ok(Expression::DoesNotExist(key(name)?))
    } else {
        Ok(Expression::Exists(key(part)?))
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn kubectls_forms_are_read() -> Result<(), String> {
        let text = "a=b,c!=d,e in (f,g),h notin (i),j,!k";
        assert_eq!(parse(text)?.to_string(), text);
        assert_eq!(parse("a == b")?.to_string(), "a=b");
        for bad in ["=b", "a b", "a in b", "!"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        Ok(())
    }
}
