//! CEL that policies and the webhook's conditions share.

use std::sync::LazyLock;

/// Names and the expressions that replace them.
pub(crate) static SHARED: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| {
    let all = include_str!("../policies/shared.cel").split("\n\n");
    let named = all.filter_map(|it| it.split_once(":\n"));
    let named = named.filter_map(|(head, expression)| Some((head.lines().last()?, expression)));
    named.collect()
});
