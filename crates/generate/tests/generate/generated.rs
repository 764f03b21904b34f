//! The committed files equal the generator's output.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gpustow_api::config::GpustowConfigSpec;
use gpustow_api::names;
use gpustow_generate::files;
use gpustow_generate::reference::pages;
use serde_json::Value;

use crate::root;

/// The complaint of `gpustow-generate --check`.
fn complaint(args: &[&str]) -> Result<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpustow-generate"));
    let output = command.arg("--check").args(args).output()?;
    let complaint = String::from_utf8(output.stderr)?;
    ensure!(
        output.status.success() == complaint.is_empty(),
        "{complaint}"
    );
    Ok(complaint)
}

#[test]
fn the_committed_files_are_the_generated_ones() -> Result<()> {
    assert_eq!(complaint(&[])?, "");
    Ok(())
}

#[test]
fn the_reference_has_only_generated_pages() -> Result<()> {
    let pages = pages(&files(names::GPU_MEM)?)?;
    let reference = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference");
    for entry in fs::read_dir(reference).context(reference)? {
        let name = entry?.file_name();
        let is_generated = pages.iter().any(|(page, _)| name == *page);
        ensure!(is_generated, "{name:?} is not generated: remove it");
    }
    Ok(())
}

#[test]
fn a_stale_tree_is_told_where_and_how_to_mend() -> Result<()> {
    let complaint = complaint(&["--output", "/nonexistent"])?;
    let first = complaint.lines().next();
    let wanted = "Error: core/crd.yaml:1 is stale: run `make generate`";
    assert_eq!(first, Some(wanted));
    Ok(())
}

/// Each field of sections of a configuration.
pub(crate) fn fields(spec: &Value) -> Vec<String> {
    let sections = spec.as_object().into_iter().flatten();
    let each = sections.flat_map(|(section, fields)| {
        let fields = fields.as_object().into_iter().flatten();
        fields.map(move |(field, _)| format!("{section}.{field}"))
    });
    each.collect()
}

#[test]
fn the_default_configuration_spells_out_every_field() -> Result<()> {
    let text = fs::read_to_string(root().join("manifests/config/default.yaml"))?;
    let mut object: Value = serde_yaml::from_str(&text)?;
    let spec = object["spec"].take();
    let defaults = serde_json::to_value(GpustowConfigSpec::default())?;
    assert_eq!(fields(&spec), fields(&defaults));
    let spec: GpustowConfigSpec = serde_json::from_value(spec)?;
    assert_eq!(serde_json::to_value(spec)?, defaults);
    Ok(())
}
