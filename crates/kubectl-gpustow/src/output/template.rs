//! The part of kubectl's JSONPath templates that lists need: text, `{.path}`, `{"text"}` and `{range .path}…{end}`.
//! See <https://kubernetes.io/docs/reference/kubectl/jsonpath/>.

use std::str::FromStr;

use jsonpath_rust::JsonPath as _;
use jsonpath_rust::parser::parse_json_path;
use serde_json::{Value as Json, from_str};

/// A template that can be read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    Path(String),
    /// The parts inside, once for each value of a path.
    Range(String, Vec<Part>),
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut parts, mut range) = (Vec::new(), None::<(String, Vec<Part>)>);
        let mut rest = text;
        while !rest.is_empty() {
            let part = if let Some(inside) = rest.strip_prefix('{') {
                let (expression, after) = expression(inside)?;
                rest = after;
                match (expression.strip_prefix("range "), range.take()) {
                    (Some(_), Some(_)) => return Err("a {range} within a {range}".to_owned()),
                    (Some(over), None) => {
                        range = Some((path(over)?, Vec::new()));
                        continue;
                    }
                    (None, Some((over, inside))) if expression == "end" => {
                        Part::Range(over, inside)
                    }
                    (None, open) => {
                        range = open;
                        match expression.starts_with('"') {
                            true => Part::Text(from_str(expression).map_err(|it| it.to_string())?),
                            false => Part::Path(path(expression)?),
                        }
                    }
                }
            } else {
                let (text, after) = rest.split_at(rest.find('{').unwrap_or(rest.len()));
                rest = after;
                Part::Text(text.to_owned())
            };
            range.as_mut().map_or(&mut parts, |it| &mut it.1).push(part);
        }
        match range {
            Some(_) => Err("a {range} without {end}".to_owned()),
            None => Ok(Self(parts)),
        }
    }
}

/// The text before the closing brace, and the text after it.
fn expression(inside: &str) -> Result<(&str, &str), String> {
    let mut quote = None;
    let mut escaped = false;
    for (at, letter) in inside.char_indices() {
        match (quote, letter) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(open), _) if open == letter => quote = None,
            (None, '"' | '\'') => quote = Some(letter),
            (None, '}') => return Ok((inside[..at].trim(), &inside[at + 1..])),
            _ => {}
        }
    }
    Err("a { without }".to_owned())
}

/// As the standard writes it: kubectl may leave out `$`, and the first dot.
fn path(text: &str) -> Result<String, String> {
    let text = text.trim().trim_start_matches(['$', '@']);
    let path = match text.chars().next() {
        _ if text == "." => "$".to_owned(),
        None | Some('.' | '[') => format!("${text}"),
        Some(_) => format!("$.{text}"),
    };
    parse_json_path(&path).map_err(|_| format!("{text} is no JSONPath"))?;
    Ok(path)
}

impl Template {
    /// The text for this document.
    pub(crate) fn of(&self, document: &Json) -> String {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Range(over, inside) => {
                    for item in document.query(over).unwrap_or_default() {
                        inside.iter().for_each(|it| it.add(item, &mut text));
                    }
                }
                _ => part.add(document, &mut text),
            }
        }
        text
    }
}

impl Part {
    fn add(&self, document: &Json, to: &mut String) {
        match self {
            Self::Text(text) => to.push_str(text),
            Self::Path(path) => {
                let found = document.query(path).unwrap_or_default();
                let texts = found.into_iter().map(|it| match it {
                    Json::String(text) => text.clone(),
                    other => other.to_string(),
                });
                to.push_str(&texts.collect::<Vec<_>>().join(" "));
            }
            Self::Range(..) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_of_kubectl_are_filled() {
        let document = json!({ "kind": "L", "items": [{ "pod": "a", "mib": 1 }, { "pod": "b", "gpus": ["0", "1"] }] });
        for (template, wanted) in [
            ("{.items[*].pod}", "a b"),
            ("{$.items[0].mib} MiB{\"\\n\"}", "1 MiB\n"),
            ("{items[1].gpus}", "[\"0\",\"1\"]"),
            (
                "{range .items[*]}{.pod}:{.mib}{\"\\t\"}{end}{.kind}",
                "a:1\tb:\tL",
            ),
            ("{.items[?(@.pod=='b')].gpus[*]}", "0 1"),
            ("{.none}", ""),
            ("text", "text"),
        ] {
            let made = Template::from_str(template).map(|it| it.of(&document));
            assert_eq!(made, Ok(wanted.to_owned()), "{template}");
        }
    }

    #[test]
    fn rubbish_is_refused_with_a_reason() {
        for (template, wanted) in [
            ("{.items", "without }"),
            ("{range .items[*]}{.pod}", "without {end}"),
            ("{range .a}{range .b}{end}{end}", "within"),
            ("{.items[}", "no JSONPath"),
            ("{\"\\q\"}", "escape"),
            ("{end}{", "without }"),
        ] {
            let refused = Template::from_str(template).expect_err(template);
            assert!(refused.contains(wanted), "{template}: {refused}");
        }
    }
}
