//! The components that `make cluster ARGS="--with …"` installs.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gpustow_testkit::Component;

#[test]
fn a_component_has_its_objects_and_flags() -> Result<()> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (name, files, args) in [
        (
            "line",
            &["rbac.yaml", "policy.yaml"][..],
            &["--line=auto"][..],
        ),
        ("keep", &["rbac.yaml"], &["--keep=120", "--keep-marks"]),
        ("evict", &["rbac.yaml"], &["--call-back", "--act=evict"]),
        ("move", &["rbac.yaml"], &["--move=10"]),
        (
            "preempt-scattered",
            &["rbac.yaml"],
            &["--preempt-scattered"],
        ),
    ] {
        let component = Component::read(&repository, name)?;
        ensure!(component.args == args, "{component:?}");
        let folder = repository.join("manifests").join(name);
        let files: Vec<_> = files.iter().map(|file| folder.join(file)).collect();
        ensure!(component.manifests == files, "{component:?}");
    }
    for name in ["nothing", "set-limits", "metrics-auth"] {
        let refused = Component::read(&repository, name).err();
        let refused = refused.with_context(|| name.to_owned())?.to_string();
        let names = "there are evict, keep, line, move, preempt-scattered";
        ensure!(refused.contains(names), "{refused}");
    }
    Ok(())
}
