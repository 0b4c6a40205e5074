//! Cluster files: TOML with the addresses of all nodes, and the lease.
//!
//! ```toml
//! nodes = ["192.0.2.1:7180", "192.0.2.2:7180"]
//! lease = 5.0
//! ```

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rdmux_key::Key;

use super::{Cluster, ClusterError, parse_lease};

/// Label of the proof from which the session is made.
const LABEL: &[u8] = b"rdmux dsm session 2\n";

/// A cluster file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cluster file {}: {problem}", path.display())]
pub struct FileError {
    path: PathBuf,
    /// With the line, where it has one.
    problem: String,
}

impl Cluster {
    /// Reads the cluster of a file, of which this process is node `own`. Only nodes with the same key, list and lease make a cluster.
    ///
    /// # Errors
    /// The file cannot be read, or does not describe a cluster with such a node.
    pub fn of_file(path: &Path, own: u32, key: &Key) -> Result<Cluster, FileError> {
        let failed = |problem: String| FileError {
            path: path.to_owned(),
            problem,
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Cluster::of_text(&text, own, key).map_err(|error| failed(error.to_string().trim_end().to_owned()))
    }

    fn of_text(text: &str, own: u32, key: &Key) -> Result<Cluster, Wrong> {
        let file: File = toml::from_str(text)?;
        for (at, member) in file.nodes.iter().enumerate() {
            if file.nodes[..at].contains(member) {
                return Err(Wrong::Value("nodes: an address with its port is there twice"));
            }
        }
        let text: Vec<String> = file.nodes.iter().map(SocketAddr::to_string).collect();
        let mut cluster = Cluster::new(own, file.nodes, [0; 16])?;
        if let Some(seconds) = file.lease {
            cluster.lease = parse_lease(seconds).ok_or(Wrong::Value("lease: not 0.1 to 3600 seconds"))?;
        }
        let lease = cluster.lease.as_nanos().to_string();
        let proof = key.proof(&[LABEL, text.join("\n").as_bytes(), b"\n", lease.as_bytes()]);
        cluster.session = *proof.first_chunk().unwrap_or(&[0; 16]);
        Ok(cluster)
    }
}

/// A cluster file.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    nodes: Vec<SocketAddr>,
    /// Seconds.
    lease: Option<f64>,
}

#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error("{0}")]
    Toml(#[from] toml::de::Error),
    #[error("{0}")]
    Value(&'static str),
    #[error("{0}")]
    Cluster(#[from] ClusterError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Cluster, Wrong> {
        Cluster::of_text(text, 1, &Key::new([7; 32]))
    }

    #[test]
    fn of_text__of_all_keys() {
        let cluster = parse("nodes = ['127.0.0.1:7180', '[::1]:7181']\nlease = 2.0").unwrap();
        assert_eq!(cluster.nodes().count(), 2);
        assert_eq!(
            cluster.address(cluster.own()),
            Some("[::1]:7181".parse().unwrap())
        );
        assert_eq!(cluster.lease, std::time::Duration::from_secs(2));
    }

    #[test]
    fn of_text__another_key_list_or_lease_is_another_session() {
        let text = "nodes = ['127.0.0.1:7180', '127.0.0.1:7181']";
        let session = parse(text).unwrap().session;
        let other_key = Cluster::of_text(text, 1, &Key::new([8; 32])).unwrap();
        let other_list = parse("nodes = ['127.0.0.1:7180', '127.0.0.1:7182']").unwrap();
        assert!(session != other_key.session && session != other_list.session);
        let lease = |seconds| parse(&format!("{text}\nlease = {seconds}")).unwrap().session;
        assert!(
            session != lease("9.5") && session == lease("5"),
            "5 s is the default"
        );
    }

    #[test]
    fn of_text__names_what_is_wrong() {
        for (word, text) in [
            ("nodes", ""),
            ("nodes", "nodes = '127.0.0.1:7180'"),
            ("line 1", "nodes = ['127.0.0.1']"),
            ("line 1", "nodes = [1]"),
            ("twice", "nodes = ['127.0.0.1:1', '127.0.0.1:1']"),
            ("lease", "nodes = ['127.0.0.1:1', '127.0.0.1:2']\nlease = 0"),
            ("line 2", "nodes = ['127.0.0.1:1', '127.0.0.1:2']\nlease = 'long'"),
            ("leases", "nodes = ['127.0.0.1:1', '127.0.0.1:2']\nleases = 1"),
            ("node 1 of 1", "nodes = ['127.0.0.1:1']"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
