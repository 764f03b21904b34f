//! The requirements of selectors on labels. An operator that is not known here holds: it refuses no node, and a
//! disruption budget with one covers the pod.

use std::iter::once;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// A label of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Label {
    /// Its key.
    pub key: Box<str>,
    /// Its value.
    pub value: Box<str>,
}

impl Label {
    /// One.
    #[must_use]
    pub fn new(key: &str, value: &str) -> Self {
        Self {
            key: key.into(),
            value: value.into(),
        }
    }
}

/// A label selector: all of these must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Selector(Box<[Requirement]>);

impl Selector {
    /// The requirements of an API object.
    pub(crate) fn of(selector: &LabelSelector) -> Self {
        let labels = selector.match_labels.iter().flatten();
        let labels = labels.map(|(key, value)| Requirement::new(key, "In", once(value)));
        let expressions = selector.match_expressions.iter().flatten();
        let expressions = expressions
            .map(|it| Requirement::new(&it.key, &it.operator, it.values.iter().flatten()));
        Self(labels.chain(expressions).collect())
    }

    /// Does it select an object with these labels?
    pub(crate) fn selects(&self, labels: &[Label]) -> bool {
        self.0.iter().all(|it| it.holds_of(labels))
    }
}

/// A selector's requirement on one label or field.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Requirement {
    pub(crate) key: Box<str>,
    operator: Box<str>,
    values: Box<[Box<str>]>,
}

impl Requirement {
    /// A requirement with the fields of an API object.
    pub(crate) fn new<'v>(
        key: &str,
        operator: &str,
        values: impl Iterator<Item = &'v String>,
    ) -> Self {
        Self {
            key: key.into(),
            operator: operator.into(),
            values: values.map(|value| value.as_str().into()).collect(),
        }
    }

    /// Does it hold of labels?
    fn holds_of(&self, labels: &[Label]) -> bool {
        let label = labels.iter().find(|label| label.key == self.key);
        self.holds(label.map(|label| &*label.value))
    }

    /// Does it hold of this value, or of none?
    pub(crate) fn holds(&self, value: Option<&str>) -> bool {
        let listed = |value: &str| self.values.iter().any(|it| **it == *value);
        let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
        let pair = || number(value).zip(number(self.values.first().map(|it| &**it)));
        match &*self.operator {
            "In" => value.is_some_and(listed),
            "NotIn" => !value.is_some_and(listed),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            "Gt" => pair().is_some_and(|(a, b)| a > b),
            "Lt" => pair().is_some_and(|(a, b)| a < b),
            _ => true,
        }
    }
}
