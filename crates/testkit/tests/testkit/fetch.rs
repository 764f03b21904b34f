//! `tests/control-plane/build.sh` fetches a release by its sums, and compiles where it cannot.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

const PROGRAMS: [&str; 4] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
];

/// Stands for Go: prints its version, and "compiles" the arguments of `go install`.
const GO: &str = r#"#!/bin/sh
case $1 in
env) echo go1.26.9 ;;
version) echo go version go1.26.9 ;;
install) mkdir -p "$GOBIN" && echo "$@" >"$GOBIN/compiled" ;;
esac
"#;

const GO_MOD: &str = "require k8s.io/kubernetes v9.99.1\n\ntool (\n\tgo.etcd.io/etcd/server/v3\n\
    \tk8s.io/kubernetes/cmd/kube-apiserver\n\tk8s.io/kubernetes/cmd/kubelet\n)\n";

fn shell(script: &str, folder: &Path) -> Result<String> {
    let output = Command::new("sh")
        .args(["-euc", script])
        .current_dir(folder)
        .output()?;
    ensure!(output.status.success(), "{script}: {output:?}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// A copy of the scripts, with one minor that does not exist, and a server on loopback that has its release.
struct Release {
    dir: TempDir,
    files: HashMap<String, Vec<u8>>,
}

impl Release {
    fn new() -> Result<Self> {
        let dir = TempDir::new()?;
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
        let pins = dir.path().join("tests/control-plane/9.99");
        fs::create_dir_all(&pins)?;
        for script in [
            "go-tools.sh",
            "control-plane/build.sh",
            "control-plane/fetch.py",
        ] {
            fs::copy(tests.join(script), dir.path().join("tests").join(script))?;
        }
        fs::write(pins.join("go.mod"), GO_MOD)?;
        fs::write(pins.join("go.sum"), "")?;
        fs::create_dir(dir.path().join("bin"))?;
        fs::write(dir.path().join("bin/go"), GO)?;
        let architecture = shell("uname -m", dir.path())?
            .replace("x86_64", "amd64")
            .replace("aarch64", "arm64");
        let mut files = HashMap::new();
        for program in PROGRAMS {
            let path = format!("v9.99.1/bin/linux/{architecture}/{program}");
            files.insert(path, format!("#!/bin/sh\necho {program}\n").into_bytes());
        }
        let name = format!("etcd-v9.9.9-linux-{architecture}");
        shell(
            &format!(
                "chmod +x bin/go && mkdir {name} && echo etcd >{name}/etcd && tar -czf etcd.tar.gz {name}"
            ),
            dir.path(),
        )?;
        files.insert(
            format!("v9.9.9/{name}.tar.gz"),
            fs::read(dir.path().join("etcd.tar.gz"))?,
        );
        let mut sums = String::new();
        for (path, bytes) in &files {
            fs::write(dir.path().join("file"), bytes)?;
            let sum = shell("sha256sum file | cut -d' ' -f1", dir.path())?;
            sums += &format!("{sum}  {path}\n");
        }
        fs::write(pins.join("sums"), sums)?;
        Ok(Self { dir, files })
    }

    /// Serves the files, each cut to at most `longest` bytes. Returns the address, and counts the requests.
    fn serve(&self, longest: usize) -> Result<(String, Arc<AtomicUsize>)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("http://{}", listener.local_addr()?);
        let (files, asked) = (self.files.clone(), Arc::new(AtomicUsize::new(0)));
        let count = asked.clone();
        std::thread::spawn(move || -> Result<()> {
            for stream in listener.incoming() {
                let mut stream = stream?;
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line)?;
                count.fetch_add(1, Ordering::SeqCst);
                let path = line.split_whitespace().nth(1).unwrap_or_default();
                let Some(bytes) = files.get(path.trim_start_matches('/')) else {
                    stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
                    continue;
                };
                let size = bytes.len();
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
                );
                stream.write_all(head.as_bytes())?;
                stream.write_all(&bytes[..size.min(longest)])?;
            }
            Ok(())
        });
        Ok((address, asked))
    }

    fn build(&self, downloads: &str) -> Result<Output> {
        let dir = self.dir.path();
        let path = std::env::var("PATH")?;
        let mut command = Command::new("sh");
        command.arg("tests/control-plane/build.sh").current_dir(dir);
        command.env("PATH", format!("{}:{path}", dir.join("bin").display()));
        command.env("KUBERNETES", "9.99").env_remove("KUBELET");
        command.env("GPUSTOW_TOOLS", dir.join("tools"));
        command.env("GPUSTOW_DOWNLOADS", downloads);
        Ok(command.output()?)
    }

    /// The folder that build.sh printed, and its messages.
    fn built(&self, downloads: &str) -> Result<(PathBuf, String)> {
        let output = self.build(downloads)?;
        let said = String::from_utf8(output.stderr)?;
        ensure!(output.status.success(), "{said}");
        let folder = String::from_utf8(output.stdout)?;
        Ok((PathBuf::from(folder.trim_end()), said))
    }

    /// The build prints `why`, and compiles.
    fn compiles(&self, downloads: &str, why: &str) -> Result<()> {
        let (folder, said) = self.built(downloads)?;
        ensure!(said.contains(why), "{said}");
        let compiled = fs::read_to_string(folder.join("compiled"))?;
        assert!(
            compiled.contains("etcd/server/v3 k8s.io/kubernetes/cmd/kube-apiserver"),
            "{compiled}"
        );
        assert!(!compiled.contains("kubelet"), "{compiled}");
        Ok(())
    }
}

#[test]
fn programs_are_fetched_once() -> Result<()> {
    let release = Release::new()?;
    let (address, asked) = release.serve(usize::MAX)?;
    let (folder, said) = release.built(&address)?;
    ensure!(said.contains("fetching server kube-apiserver"), "{said}");
    for program in PROGRAMS {
        assert_eq!(shell(&format!("./{program}"), &folder)?, program);
    }
    assert_eq!(fs::read_to_string(folder.join("server"))?, "etcd\n");
    let requests = asked.load(Ordering::SeqCst);
    let (again, said) = release.built(&address)?;
    assert_eq!((again, said.as_str()), (folder, ""));
    assert_eq!(asked.load(Ordering::SeqCst), requests);
    Ok(())
}

#[test]
fn a_program_with_another_sum_is_not_installed() -> Result<()> {
    let mut release = Release::new()?;
    let of_kubectl = |path: &&mut String| path.ends_with("kubectl");
    let mut paths: Vec<String> = release.files.keys().cloned().collect();
    let path = paths.iter_mut().find(of_kubectl).context("no kubectl")?;
    release
        .files
        .insert(path.clone(), b"#!/bin/sh\necho forged\n".to_vec());
    let (address, _) = release.serve(usize::MAX)?;
    release.compiles(&address, "its SHA-256 differs")
}

#[test]
fn a_transfer_that_breaks_off_is_not_installed() -> Result<()> {
    let release = Release::new()?;
    let (address, _) = release.serve(10)?;
    release.compiles(&address, "fetch: no server from")
}

#[test]
fn kubernetes_is_compiled_where_nothing_can_be_fetched() -> Result<()> {
    let release = Release::new()?;
    release.compiles("http://127.0.0.1:1", "compiling instead")?;
    // With an empty address it does not try.
    let release = Release::new()?;
    release.compiles("", "compiling what")
}
