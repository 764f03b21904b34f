//! The content of a cell.

use std::cmp::Ordering;
use std::fmt::Display;

use gpustow_inspect::{age, memory};
use gpustow_pack::Mib;
use serde::Serialize;
use serde_json::{Value as Json, json};

/// One cell.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Nothing,
    Text(String),
    Good(String),
    /// Something that needs a person.
    Bad(String),
    Count(u64),
    Memory(Mib),
    /// Seconds.
    Age(u64),
    /// People get one digit, programs two.
    Number(f64),
    Names(Vec<String>),
    /// Words for people, and values for programs.
    Both(String, Json),
    /// Requested, used, room: drawn on a terminal only.
    Bar(Mib, Mib, Mib),
}

/// The types that become a value, each in its own way.
macro_rules! values {
    ($($from:ty: $it:ident => $value:expr),*) => {
        $(impl From<$from> for Value {
            fn from($it: $from) -> Self {
                $value
            }
        })*
    };
}

values! {
    String: it => Self::Text(it), &str: it => Self::Text(it.to_owned()), Vec<String>: it => Self::Names(it),
    u64: it => Self::Count(it), usize: it => Self::Count(it as u64), u32: it => Self::Count(it.into()),
    Mib: it => Self::Memory(it), f64: it => Self::Number(it)
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(found: Option<T>) -> Self {
        found.map_or(Self::Nothing, Into::into)
    }
}

impl Value {
    /// Things, each of which has words for people and is an object for programs.
    pub(crate) fn things<T: Display + Serialize>(all: &[T]) -> Self {
        let words: Vec<String> = all.iter().map(ToString::to_string).collect();
        Self::Both(words.join(", "), json!(all))
    }

    pub(super) fn shown(&self) -> String {
        match self {
            Self::Nothing => "-".to_owned(),
            Self::Both(words, _) if words.is_empty() => "-".to_owned(),
            Self::Text(text) | Self::Good(text) | Self::Bad(text) | Self::Both(text, _) => {
                printable(text)
            }
            Self::Count(count) => count.to_string(),
            Self::Memory(amount) => memory(*amount),
            Self::Age(seconds) => age(*seconds),
            Self::Number(number) => format!("{number:.1}"),
            Self::Names(list) if list.is_empty() => "-".to_owned(),
            Self::Names(list) => printable(&list.join(",")),
            Self::Bar(held, used, room) => bar(*held, *used, *room, 20),
        }
    }

    pub(super) fn json(&self) -> Json {
        match self {
            Self::Nothing | Self::Bar(..) => Json::Null,
            Self::Text(text) | Self::Good(text) | Self::Bad(text) => json!(text),
            Self::Count(count) | Self::Age(count) => json!(count),
            Self::Memory(amount) => json!(amount.bytes()),
            Self::Number(number) => json!((number * 100.0).round() / 100.0),
            Self::Names(list) => json!(list),
            Self::Both(_, json) => json.clone(),
        }
    }

    pub(super) fn csv(&self) -> String {
        let text = match self {
            Self::Names(list) => list.join(" "),
            Self::Both(words, _) => words.clone(),
            other => match other.json() {
                Json::Null => String::new(),
                Json::String(text) => text,
                other => other.to_string(),
            },
        };
        // A cell that starts so is a formula to a spreadsheet.
        let text = if text.starts_with(['=', '+', '-', '@']) {
            format!("'{text}")
        } else {
            text
        };
        if text.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", text.replace('"', "\"\""))
        } else {
            text
        }
    }

    /// Is it worth a line of its own?
    pub(super) fn says_something(&self) -> bool {
        match self {
            Self::Nothing | Self::Good(_) => false,
            Self::Names(list) => !list.is_empty(),
            Self::Both(words, _) => !words.is_empty(),
            _ => true,
        }
    }

    pub(super) fn is_number(&self) -> bool {
        matches!(
            self,
            Self::Count(_) | Self::Memory(_) | Self::Age(_) | Self::Number(_)
        )
    }

    pub(super) fn order(&self, other: &Self) -> Ordering {
        match (self.json(), other.json()) {
            (Json::Number(a), Json::Number(b)) => a.as_f64().partial_cmp(&b.as_f64()),
            (Json::Null, Json::Null) => Some(Ordering::Equal),
            (Json::Null, _) => Some(Ordering::Less),
            (_, Json::Null) => Some(Ordering::Greater),
            _ => Some(self.shown().cmp(&other.shown())),
        }
        .unwrap_or(Ordering::Equal)
    }
}

/// Names of files and agents' texts may hold anything; a terminal must not obey it.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|letter| if letter.is_control() { '?' } else { letter })
        .collect()
}

/// So many cells: `#` requested and in use, `=` requested and idle, `+` used beyond requests,
/// `.` free.
fn bar(held: Mib, used: Mib, room: Mib, length: u64) -> String {
    let all = (held.max(used) + room).0.max(1);
    let cells = |Mib(part): Mib| {
        usize::try_from((part.saturating_mul(length) + all / 2) / all).unwrap_or(0)
    };
    let (taken, held, used) = (cells(held.max(used)), cells(held), cells(used));
    (0..cells(Mib(all)))
        .map(|cell| match (cell < taken, cell < held, cell < used) {
            (false, ..) => '.',
            (_, true, true) => '#',
            (_, true, false) => '=',
            (_, false, _) => '+',
        })
        .collect()
}
