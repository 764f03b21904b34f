//! Every command in the documentation is run on a real control plane, or a list here gives the reason why not.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, Options, Webhook};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, PostParams};
use serde_json::json;
use tokio::process::Command;
use tokio::time::timeout;

use crate::install::{forget, install};
use crate::observability::operator_crds;
use crate::policies::pod;
use crate::support::{gpustow, repository};

/// How commands begin that are not run here, and why.
const NOT_RUN: [(&str, &str); 25] = [
    ("kubectl annotate pod my-model", "asleep.rs does it"),
    ("kubectl wait pod my-model", "asleep.rs does it"),
    ("git clone", "this is the repository"),
    (
        "helm ",
        "helm.rs installs, upgrades, rolls back and uninstalls",
    ),
    (
        "cargo install --path crates/kubectl-gpustow",
        "the program that it would install is used",
    ),
    (
        "kubectl gpustow ui",
        "runs until Ctrl-C; tests/page opens it in a browser",
    ),
    ("kubectl logs", "no kubelet runs the pods"),
    ("kubectl wait pod first-pod", "no kubelet runs the pods"),
    ("kubectl debug", "no kubelet runs the pods"),
    (
        "kubectl patch deploy web",
        "no workload has half a day of history",
    ),
    (
        "kubectl gpustow advise -A --prometheus",
        "no Prometheus runs here; prometheus.rs does it",
    ),
    ("skopeo copy", "no registry here"),
    ("cp -r manifests", "writes below /etc"),
    (
        "cargo run --package gpustow-generate",
        "writes below /etc; the generator is tested in its crate",
    ),
    ("cargo test --test simulate of_300", "make test runs it"),
    ("sed -i s,gpustow.dev", "writes below /etc"),
    ("kubectl top", "no metrics server"),
    ("kubectl port-forward", "no kubelet runs the pods"),
    ("kubectl rollout", "no kubelet runs the pods"),
    (
        "kubectl annotate pod POD gpustow.dev/gpu-mem-limit",
        "no driver limits the pod; tests/node/limits.rs changes the limit of one that runs",
    ),
    (
        "kubectl apply --server-side -k manifests/overlays/own-certificate",
        "no kubelet runs the pods behind its Service; webhook.rs applies it",
    ),
    (
        "kubectl patch mutatingwebhookconfiguration",
        "the same; webhook.rs patches it",
    ),
    (
        "kubectl -n gpustow-system annotate secret gpustow-webhook-tls",
        "the same; webhook_certificate.rs does it",
    ),
    (
        "kubectl delete -f manifests/certificate",
        "the same; webhook_certificate.rs applies it",
    ),
    (
        "kubectl patch pod POD --type=strategic",
        "no pod is queued; attack/queue.rs takes gates off",
    ),
];
/// Pages whose commands another test runs.
const ELSEWHERE: [(&str, &str); 1] = [("docs/uninstall.md", "manifests.rs uninstalls by it")];
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug)]
struct Found {
    /// Page and line.
    place: String,
    script: String,
}

/// README and everything below docs.
fn pages() -> Result<Vec<(String, String)>> {
    let mut pages = vec!["README.md".to_owned()];
    for folder in ["docs", "docs/runbooks"] {
        for entry in std::fs::read_dir(repository(folder))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".md") {
                pages.push(format!("{folder}/{name}"));
            }
        }
    }
    pages[1..].sort();
    pages
        .into_iter()
        .map(|page| {
            let text = std::fs::read_to_string(repository(&page))?;
            Ok((page, text))
        })
        .collect()
}

fn is_command(line: &str) -> bool {
    let words = [
        "kubectl ", "make ", "curl ", "git ", "cargo ", "openssl ", "helm ", "$ ",
    ];
    words.iter().any(|word| line.starts_with(word))
}

/// Commands in sentences, which may go on in the next line.
fn inline(page: &str, paragraph: &mut Vec<(usize, &str)>, found: &mut Vec<Found>) {
    let lines = paragraph.iter().map(|(_, line)| line.trim());
    let text = lines.collect::<Vec<_>>().join(" ");
    let number = paragraph.first().map_or(0, |(number, _)| *number);
    paragraph.clear();
    let codes = text.split('`').skip(1).step_by(2);
    // Without a verb it is the name of the plugin.
    let codes = codes.filter(|code| is_command(code) && *code != "kubectl gpustow");
    found.extend(codes.map(|code| Found {
        place: format!("{page}:{number}"),
        script: code.to_owned(),
    }));
}

fn commands(page: &str, text: &str) -> Result<Vec<Found>> {
    let (mut found, mut paragraph) = (Vec::new(), Vec::new());
    let mut block: Option<(&str, usize, Vec<&str>)> = None;
    for (line, number) in text.lines().zip(1..) {
        match (&mut block, line.trim_start().strip_prefix("```")) {
            (None, None) if line.trim().is_empty() || line.starts_with('|') => {
                inline(page, &mut paragraph, &mut found);
                paragraph.push((number, line));
            }
            (None, None) => paragraph.push((number, line)),
            (None, Some(kind)) => {
                inline(page, &mut paragraph, &mut found);
                block = Some((kind.trim(), number, Vec::new()));
            }
            (Some((_, _, lines)), None) => lines.push(line),
            (Some(_), Some(_)) => {
                let (kind, number, lines) = block.take().unwrap_or_default();
                let place = format!("{page}:{number}");
                let commands: Vec<_> = match kind {
                    "sh" => lines,
                    "console" => lines
                        .iter()
                        .filter_map(|it| it.strip_prefix("$ "))
                        .collect(),
                    _ => {
                        let hidden = lines.iter().find(|line| is_command(line));
                        ensure!(hidden.is_none(), "{place}: mark it as sh: {hidden:?}");
                        continue;
                    }
                };
                found.push(Found {
                    place,
                    script: commands.join("\n"),
                });
            }
        }
    }
    inline(page, &mut paragraph, &mut found);
    Ok(found)
}

/// The script without the commands that are not run here.
fn runnable(found: &Found, makefile: &str, case: &Case) -> Result<String> {
    let Found { place, script, .. } = found;
    let mut left = String::new();
    for line in script.replace("\\\n", " ").lines() {
        // Commands of a list are indented.
        let line = line.trim();
        if let Some(target) = line.strip_prefix("make ") {
            let target = target.split_whitespace().next().unwrap_or_default();
            ensure!(
                makefile.contains(&format!("\n{target}:")),
                "{place}: no target {target}"
            );
        } else if !NOT_RUN.iter().any(|(begin, _)| line.starts_with(begin)) {
            left += line;
            left.push('\n');
        }
    }
    for (word, thing) in [
        ("[NODE]", "NODE"),
        ("NODE", &case.node_name("n")),
        (" NAME", &format!(" {}", case.namespace)),
        (" POD", &format!(" {}/shown", case.namespace)),
        (" pod.yaml", " manifests/examples/inference-pod.yaml"),
    ] {
        left = left.replace(word, thing);
    }
    Ok(left)
}

/// A folder with the plugin as kubectl finds it. As part of the workspace it is built with the same
/// features of its dependencies as the tests were.
async fn plugin() -> Result<tempfile::TempDir> {
    let cargo = Command::new(env!("CARGO"))
        .args([
            "build",
            "--locked",
            "--quiet",
            "--workspace",
            "--bin=kubectl-gpustow",
        ])
        .current_dir(repository(""))
        .status()
        .await?;
    ensure!(cargo.success(), "kubectl-gpustow cannot be built");
    let tests = std::env::current_exe()?;
    let built = tests.parent().and_then(|deps| deps.parent());
    let built: PathBuf = built.context("no target folder")?.join("kubectl-gpustow");
    let folder = tempfile::tempdir()?;
    std::fs::copy(built, folder.path().join("kubectl-gpustow"))?;
    Ok(folder)
}

/// A pod of the sharer from which docs/migrate.md moves, on its GPU.
async fn run_old_pod(case: &Case) -> Result<()> {
    let limits = json!({ "resources": { "limits": { names::GPUSHARE_MEM: "2" } }, "name": "main" });
    let notes = json!({ "ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "2", "ALIYUN_COM_GPU_MEM_DEV": "24" });
    let spec = json!({ "nodeName": case.node_name("n"), "containers": [limits] });
    let mut old = pod(notes, spec)?;
    old.metadata.name = Some("old".to_owned());
    let pods = Api::<Pod>::namespaced(case.client.clone(), &case.namespace);
    pods.create(&PostParams::default(), &old).await?;
    Ok(())
}

#[tokio::test]
async fn every_command_in_the_documentation_works() -> Result<()> {
    let makefile = std::fs::read_to_string(repository("Makefile"))?;
    let cluster = ControlPlane::start(Options {
        controllers: true,
        ..Options::default()
    })
    .await?;
    install(&cluster, "manifests/base").await?;
    let crds = operator_crds().await?;
    cluster
        .kubectl(&["apply", "-f", &crds.display().to_string()])
        .await?;
    let case = Case::new(&cluster, "docs").await?;
    case.node("n", &[24576, 24576])
        .label("node.kubernetes.io/instance-type", "g5.48xlarge")
        .create(&case.client)
        .await?;
    case.pod("shown").gpu_mem(8192).create(&case.client).await?;
    run_old_pod(&case).await?;
    let plugin = plugin().await?;
    let scratch = tempfile::tempdir()?;

    let path = std::env::var("PATH")?;
    let path = format!(
        "{}:{}:{path}",
        plugin.path().display(),
        cluster.bin().display()
    );
    let (mut ran, mut failed) = (0, Vec::new());
    for (page, text) in pages()? {
        if ELSEWHERE.iter().any(|(other, _)| *other == page) {
            continue;
        }
        for found in commands(&page, &text)? {
            let script = runnable(&found, &makefile, &case)?;
            let place = found.place;
            if script.trim().is_empty() {
                continue;
            }
            // An installation here has the API server call the webhook of this test.
            let installs =
                ["base", "overlays/"].map(|it| format!("apply --server-side -k manifests/{it}"));
            let installs = installs.iter().any(|it| script.contains(it));
            if installs {
                forget(&cluster).await?;
            }
            // Commands write into a scratch folder, and read the repository's files.
            let begin = "for it in manifests scheduler-config docs crates; do ln -sfn \"$REPO/$it\" .; done\n";
            let command = Command::new("bash")
                .args(["-euo", "pipefail", "-c", &format!("{begin}{script}")])
                .current_dir(scratch.path())
                .env("REPO", repository(""))
                .env("PATH", &path)
                .env("HOME", scratch.path())
                .env("KUBECONFIG", cluster.admin_kubeconfig())
                .stdin(Stdio::null())
                .kill_on_drop(true)
                .output();
            let Ok(output) = timeout(LIMIT, command).await else {
                bail!("{place}: not done after {LIMIT:?}: {script}");
            };
            let output = output?;
            ran += 1;
            if installs {
                Webhook::keep(&cluster, gpustow()).await?;
            }
            // 1 is an answer of the plugin's: no.
            let no = script.starts_with("kubectl gpustow ") && output.status.code() == Some(1);
            if !output.status.success() && !no {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                failed.push(format!("{place}: {} {said}", script.trim()));
            }
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    ensure!(ran > 25, "only {ran} commands found");
    Ok(())
}
